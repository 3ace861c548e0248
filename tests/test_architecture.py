"""The architecture: who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
PACKAGES = sorted(p for package in ("models", "pipeline") for p in (ROOT / package).rglob("*.py"))
SOURCES = SCRIPTS + PACKAGES
TESTS = sorted(p for p in (ROOT / "tests").rglob("*.py"))

# What runs where no TensorFlow is installed: a client of a server, a reader of a manifest.
WITHOUT_TENSORFLOW = {
    *(
        "models.config",
        "models.families",
        "pipeline.checkpoints.loader",
        "pipeline.checkpoints.diffusers_folder",
        "pipeline.checkpoints.diffusers_config",
        "pipeline.checkpoints.keymaps",
        "pipeline.checkpoints.single_file",
        "pipeline.checkpoints.single_file_config",
    ),
    *(
        "pipeline.manifest",
        "pipeline.sampling.samplers",
        "pipeline.prompts.tokenizer",
        "pipeline.sampling.noise",
        "pipeline.generate",
    ),
    *(
        "pipeline.cli",
        "pipeline.savedmodel.publish",
        "pipeline.checkpoints.kerascv",
        "pipeline.serving",
        "pipeline.sampling.settings",
    ),
    *("pipeline.serving.__main__", "pipeline.serving.serve", "pipeline.serving.source", "pipeline.serving.status"),
    *("pipeline.serving.admission", "pipeline.serving.metrics"),
    *("pipeline.images.png", "pipeline.prompts.weighting", "pipeline.sampling.schedules", "pipeline.sampling.solvers"),
    *(
        "pipeline.benchmark.timing",
        "pipeline.benchmark.report",
        "pipeline.images.picture",
        "pipeline.compare",
        "pipeline.benchmark.differences",
    ),
    *("pipeline.peak", "pipeline.growth"),
    *(
        "pipeline.savedmodel.arrays",
        "pipeline.commands.generate",
        "pipeline.benchmark.server_load",
        "pipeline.serving.client",
        "pipeline.serving.rest_client",
    ),
    *("pipeline.serving.status", "pipeline.serving.check", "pipeline.serving.files"),
    *(
        "pipeline.checkpoints.weight_files",
        "pipeline.checkpoints.hub",
        "pipeline.checkpoints.locate",
        "pipeline.checkpoints.pickles",
        "pipeline.checkpoints.other_vae",
    ),
    *(
        "pipeline.precision",
        "pipeline.checkpoints.kerascv_h5",
        "pipeline.compile_cache",
        "pipeline.commands.warm",
        "pipeline.roofline",
    ),
}
# The only doors into the networks; everything else sees the plain data of models.config and models.families.
USERS_OF_MODELS = {
    "pipeline.export",
    "pipeline.checkpoints.source",
    "pipeline.checkpoints.locate",
    "pipeline.checkpoints.pickles",
    "pipeline.checkpoints.other_vae",
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
OPTIONAL = {"torch", "transformers", "diffusers", "keras_cv", "keras_hub", "flax", "jax", "matplotlib", "safetensors"}


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, module_level_only: bool = False) -> set[str]:
    """Dotted names a file imports; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text())
    inside = set()
    if module_level_only:
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION | ast.Lambda):
                inside |= {id(child) for child in ast.walk(node)}
            elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                inside |= {id(child) for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(names: set[str]) -> set[str]:
    return {n.partition(".")[0] for n in names}


def test_imports_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("import a.b\nfrom c import d\ndef f():\n    import e\nif __name__ == '__main__':\n    import g\n")
    assert imports(path) == {"a.b", "c", "c.d", "e", "g"}
    assert imports(path, module_level_only=True) == {"a.b", "c", "c.d"}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_go_down_only(path):
    """Scripts -> pipeline -> models; nobody imports scripts or tests."""
    used, me = imports(path), name(path)
    assert "tests" not in top(used) and not {"conftest", *map(name, SCRIPTS)} & top(used)
    if me.startswith("models"):
        assert "pipeline" not in top(used)
    elif me not in USERS_OF_MODELS:
        assert {n for n in used if n.startswith("models.")} <= {
            n for n in used if n.startswith(("models.config", "models.families"))
        }


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_tests_import_no_tests(path):
    assert not {"tests", "conftest"} & top(imports(path))


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_networks_know_no_tensorflow(path):
    """models/ is keras.ops alone; some modules of pipeline/ must work where TensorFlow is not installed."""
    if name(path).startswith("models"):
        assert not {"tensorflow", "torch", "jax"} & top(imports(path))
    if name(path) in WITHOUT_TENSORFLOW:
        used = imports(path, module_level_only=True)
        assert not {"tensorflow", "keras"} & top(used)
        assert not {"pipeline.load", "pipeline.export"} & used


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_peers_are_optional(path):
    assert not OPTIONAL & top(imports(path, module_level_only=True))


def test_packages_import_nothing():
    for package in ("models", "pipeline"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        assert [type(node) for node in tree.body] == [ast.Expr] and ast.get_docstring(tree)


def test_importing_without_tensorflow():
    """What the syntax tree says is true of the running program, imports of imports included."""
    present = sorted(WITHOUT_TENSORFLOW & {name(p) for p in PACKAGES})
    code = f"import sys, {', '.join(present)}; print(sorted({{'tensorflow', 'keras'}} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTION):
            lines = node.end_lineno - node.lineno + 1
            # Inner functions are counted by themselves.
            inner = [n for n in ast.walk(node) if isinstance(n, FUNCTION) and n is not node]
            lines -= sum(n.end_lineno - n.lineno + 1 for n in inner)
            assert lines < 60, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_public_things_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), node.name
