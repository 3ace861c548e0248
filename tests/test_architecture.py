"""The architecture: who may import whom, how long a file may be, how calls and docstrings are written."""

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
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

# Rooms from low to high; a module belongs to the longest name that begins its own, and imports none above its room.
ROOMS = [
    {"models.errors"},
    {"models.config", "models.families", "models.steps"},
    {"models.export_spec"},
    {"models"},
    {"pipeline.files", "pipeline.machine", "pipeline.compare", "pipeline.cli"},
    {"pipeline.manifest", "pipeline.compile_cache"},
    {"pipeline.sampling", "pipeline.prompts", "pipeline.images"},
    {"pipeline.checkpoints", "pipeline.savedmodel"},
    {"pipeline.export"},
    {"pipeline.load"},
    {"pipeline.generate"},
    {"pipeline.serving"},
    {"pipeline.benchmark"},
    {"pipeline.commands"},
    {"serialize_savedmodels", "benchmark"},
]
# Each pair is on floors of its own only because floors are in a row: neither knows the other.
STRANGERS = [
    ("pipeline.generate", "pipeline.load"),
    ("pipeline.generate", "pipeline.export"),
    ("pipeline.load", "pipeline.export"),
]
# What computes; plain data (errors, config, families, steps, export_spec) is open to all.
NETWORKS = {f"models.{name}" for name in ("layers", "winograd", "text_encoder", "unet", "vae", "loop", "endpoints")}
USERS_OF_NETWORKS = ("pipeline.export", "pipeline.checkpoints", "pipeline.savedmodel.signatures")
USERS_OF_TENSORFLOW = ("pipeline.export", "pipeline.load", "pipeline.savedmodel", "pipeline.serving")
# Libraries that only those who ask for what they do need.
OPTIONAL = {"torch", "transformers", "diffusers", "keras_cv", "keras_hub", "flax", "jax", "matplotlib"}


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name(path) for path in SOURCES}


def is_door(node: ast.AST) -> bool:
    """Whether a statement is `if __name__ == "__main__":`, by which a spine file lets its command in."""
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def imports(path: Path, module_level_only: bool = False) -> set[str]:
    """Dotted names a file imports; `from a import b` counts as a and a.b. Doors are not counted."""
    tree = ast.parse(path.read_text())
    inside = {id(child) for node in tree.body if is_door(node) for child in ast.walk(node)}
    if module_level_only:
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION | ast.Lambda):
                inside |= {id(child) for child in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules_imported(path: Path) -> set[str]:
    return imports(path) & MODULES - {"pipeline", "models"}


def top(names: set[str]) -> set[str]:
    return {n.partition(".")[0] for n in names}


def floor(module: str) -> int:
    fitting = [(len(room), i) for i, rooms in enumerate(ROOMS) for room in rooms if f"{module}.".startswith(f"{room}.")]
    assert fitting, f"{module} is in no room of the list"
    return max(fitting)[1]


def test_imports_are_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("import a.b\nfrom c import d\ndef f():\n    import e\nif __name__ == '__main__':\n    import g\n")
    assert imports(path) == {"a.b", "c", "c.d", "e"}
    assert imports(path, module_level_only=True) == {"a.b", "c", "c.d"}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_go_down_only(path):
    me = name(path)
    if me in ("pipeline", "models"):
        return
    above = {other for other in modules_imported(path) if floor(other) > floor(me)}
    assert not above, f"{me} imports {sorted(above)} from a room above its own"
    for one, other in STRANGERS:
        assert me != one or other not in imports(path)
        assert me != other or one not in imports(path)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_door_leads_to_one_command(path):
    """`python -m pipeline.generate` and the like: two statements, an import of the command and its call."""
    doors = [node for node in ast.parse(path.read_text()).body if is_door(node)]
    if path in SCRIPTS or path.name == "__main__.py" or "workers" in path.parts or not doors:
        return
    [door] = doors
    first = door.body[0]
    assert isinstance(first, ast.ImportFrom) and first.module == "pipeline.commands" and len(door.body) == 2


def test_there_are_no_circles():
    # `from pipeline.serving import status` names its own package too, which is no arrow.
    arrows = {
        name(path): {other for other in modules_imported(path) if not f"{name(path)}.".startswith(f"{other}.")}
        for path in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join([*way[way.index(module) :], module])}"
        if module not in done:
            for other in sorted(arrows[module]):
                visit(other, (*way, module))
            done.add(module)

    for module in sorted(arrows):
        visit(module, ())


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_nothing_below_reaches_scripts_or_tests(path):
    """Neither by import nor by path."""
    text = path.read_text()
    assert not {"tests", "conftest", *map(name, SCRIPTS)} & top(imports(path))
    strings = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [s for s in strings if s in ("tests", "benchmark.py", "serialize_savedmodels.py")]


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_tests_import_no_tests(path):
    assert not {"tests", "conftest"} & top(imports(path))


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_who_knows_the_networks_and_tensorflow(path):
    """models/ is keras.ops alone; only what makes, loads and serves SavedModels imports TensorFlow when imported."""
    me, used = name(path), imports(path)
    if me.startswith("models"):
        assert not {"tensorflow", "torch", "jax", "pipeline"} & top(used)
    elif not me.startswith(USERS_OF_NETWORKS):
        assert not used & NETWORKS
    if not me.startswith(USERS_OF_TENSORFLOW):
        assert "tensorflow" not in top(imports(path, module_level_only=True))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_peers_are_optional(path):
    if "workers" not in path.parts:
        assert not OPTIONAL & top(imports(path, module_level_only=True))


def test_packages_import_nothing():
    for path in PACKAGES:
        if path.name == "__init__.py" and path.parent.name != "serving":
            tree = ast.parse(path.read_text())
            assert [type(node) for node in tree.body] == [ast.Expr] and ast.get_docstring(tree), path


def test_pipeline_is_a_spine_of_few_files():
    assert len([p for p in (ROOT / "pipeline").glob("*.py") if p.name != "__init__.py"]) <= 12


def test_importing_without_tensorflow():
    """What a client of a server, a reader of a manifest and a reader of checkpoints load, imports of imports too."""
    clients = ["manifest", "generate", "cli", "serving", "serving.client", "serving.rest_client", "commands.generate"]
    clients += ["checkpoints.source", "checkpoints.loader", "sampling.samplers", "prompts.tokenizer", "images.png"]
    names = ", ".join(f"pipeline.{client}" for client in clients)
    code = f"import sys, {names}; print(sorted({{'tensorflow', 'keras'}} & sys.modules.keys()))"
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


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_arguments_are_passed_by_name_or_position(path):
    """No splats of literals: f(*(a, b)) and f(**{"a": b}) say nothing that f(a, b) and f(a=b) do not say better."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            splats = [a.value for a in node.args if isinstance(a, ast.Starred)]
            splats += [k.value for k in node.keywords if k.arg is None]
            bad = [s for s in splats if isinstance(s, ast.Tuple | ast.List | ast.Dict)]
            assert not bad, f"{path}:{node.lineno}: {ast.unparse(bad[0])}"


@pytest.mark.parametrize("path", PACKAGES, ids=name)
def test_public_things_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef) and not node.name.startswith("_") and node.name != "main":
            assert ast.get_docstring(node), node.name
