"""Checkpoints by their name on the Hub, from a stand-in for it that serves on this machine and counts."""

import contextlib
import errno
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest

from models.errors import InputError
from pipeline.checkpoints import diffusers_folder, hub, locate
from pipeline.checkpoints.weight_files import weight_files

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
WEIGHTS = {
    *("text_encoder/model.safetensors", "unet/diffusion_pytorch_model.safetensors"),
    "vae/diffusion_pytorch_model.safetensors",
}
# What repositories hold beside what is read.
OTHERS = [
    *("README.md", "v1-5-pruned.safetensors", "v1-5-pruned.ckpt", "safety_checker/model.safetensors"),
    *("safety_checker/config.json", "feature_extractor/preprocessor_config.json", "unet/diffusion_flax_model.msgpack"),
    *("unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.safetensors"),
    *("unet/diffusion_pytorch_model.non_ema.safetensors", "text_encoder/pytorch_model.bin", "unet/model.onnx"),
    *("vae/diffusion_pytorch_model.fp16.safetensors", "vae/openvino_model.xml", "text_encoder/model.onnx_data"),
    *("vae_decoder/model.onnx", "text_encoder/model.fp16.safetensors", "tokenizer/model.safetensors"),
]


class StandIn(http.server.ThreadingHTTPServer):
    """A Hub with one model, org/tiny: `files` per commit. It writes down what is asked."""

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.asked, self.cut, self.refuse = files, [], {}, None
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Paths whose contents were asked for, in alphabetical order."""
        return sorted(path.partition(f"/{commit}/")[2] for method, path, commit, _ in self.asked if method == "GET")


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        path, api = self.path.partition("?")[0], "/api/models/org/tiny"
        if self.server.refuse and (self.server.refuse[0] in path):
            return self.answer(self.server.refuse[1], X_Error_Code=self.server.refuse[2])
        if path == api or path.startswith(f"{api}/revision/"):
            commit = COMMITS.get(path.removeprefix(api).removeprefix("/revision/") or "main")
            if commit is None:
                return self.answer(404, X_Error_Code="RevisionNotFound")
            return self.answer(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": []}).encode())
        if path.startswith(f"{api}/tree/"):
            files = self.server.files[path.removeprefix(f"{api}/tree/")]
            listing = [{"type": "file", "path": n, "size": len(c), "oid": etag(c)} for n, c in files.items()]
            return self.answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        if path.startswith("/org/tiny/resolve/"):
            commit, _, name = path.removeprefix("/org/tiny/resolve/").partition("/")
            return self.file(commit, name)
        return self.answer(401 if "secret" in path else 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def file(self, commit, name):
        content = self.server.files[commit][name]
        self.server.asked.append((self.command, self.path, commit, self.headers.get("Range")))
        headers = {"ETag": f'"{etag(content)}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and self.server.cut.get(name):
            # Half of what is promised, then silence: a network that went away.
            end = self.server.cut[name].pop()
            self.send_response(206 if start else 200)
            for key, value in {"Content-Length": len(content) - start, **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(content[start:end])
            self.close_connection = True
            return None
        return self.answer(206 if start else 200, content[start:], **headers)


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def content(checkpoint_folder):
    """The tiny checkpoint as a repository that holds everything in every format."""
    files = {p.relative_to(checkpoint_folder).as_posix(): p.read_bytes() for p in checkpoint_folder.rglob("*.*")}
    index = json.loads(files["model_index.json"])
    index |= {"safety_checker": ["stable_diffusion", "Checker"], "feature_extractor": ["transformers", "Extractor"]}
    files["model_index.json"] = json.dumps(index).encode()
    return files | {name: b"not to be fetched: " + name.encode() for name in OTHERS}


@pytest.fixture
def serve(content):
    """A running stand-in with that repository under both revisions, which differ in one file."""
    server = StandIn({COMMITS["main"]: dict(content), COMMITS["v1"]: content | {"scheduler/notes.txt": b"older"}})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def checkpoint(serve, tmp_path):
    """Function (option, **options) -> folder of that checkpoint, fetched from the stand-in."""

    def fetch(option, **options):
        return locate.from_hub(option, endpoint=serve.endpoint, cache_dir=tmp_path / "cache", **options)

    return fetch


def expected(content, weights=WEIGHTS):
    """What is read: settings, vocabularies and one file of weights per component."""
    kept = {"text_encoder", "unet", "vae", "tokenizer", "scheduler", "model_index.json", "generation_config.json"}
    settings = {n for n in content if n.endswith((".json", ".txt")) and n.partition("/")[0] in kept}
    return sorted(settings | set(weights))


def test_what_is_fetched(serve, checkpoint, content, checkpoint_folder):
    """One format of each part and no more; what arrives is the checkpoint."""
    folder = checkpoint("org/tiny")
    assert serve.fetched() == expected(content)
    for name in serve.fetched():
        assert (folder / name).read_bytes() == content[name]
    assert folder.name == COMMITS["main"]
    tensors = diffusers_folder.read_weights(folder, "unet")
    assert tensors.keys() == diffusers_folder.read_weights(checkpoint_folder, "unet").keys()


def test_a_variant_where_there_is_one(serve, checkpoint, content):
    half = {n.replace(".safetensors", ".fp16.safetensors") for n in WEIGHTS}
    checkpoint("org/tiny", variant="fp16")
    assert serve.fetched() == expected(content, half)
    serve.asked.clear()
    checkpoint("org/tiny", variant="non_ema")
    # Only the UNet has it; the other parts come as plain files.
    rest = {n for n in WEIGHTS if "unet" not in n}
    assert serve.fetched() == sorted(rest | {"unet/diffusion_pytorch_model.non_ema.safetensors"})


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        (
            ["m-00001-of-00002", "m-00002-of-00002", "m.fp16"],
            None,
            [".index.json", "-00001-of-00002", "-00002-of-00002"],
        ),
        (["m.fp16-00001-of-00001", "m-00001-of-00001"], "fp16", [".fp16.index.json", ".fp16-00001-of-00001"]),
    ],
)
def test_shards_and_their_index(names, variant, chosen):
    files = [f"{name}.safetensors" for name in names]
    files += ["m.safetensors.index.json", "m.safetensors.index.fp16.json", "m.bin", "m.msgpack"]
    index = "m.safetensors.index.fp16.json" if variant else "m.safetensors.index.json"
    wanted = [index, *(f"m{infix}.safetensors" for infix in chosen[1:])]
    assert weight_files(files, "m", variant) == wanted


def test_a_second_run_fetches_nothing(serve, checkpoint):
    first = checkpoint("org/tiny")
    serve.asked.clear()
    assert checkpoint("org/tiny@main") == first and serve.asked == []


def test_a_revision(serve, checkpoint):
    folder = checkpoint("org/tiny@v1")
    assert folder.name == COMMITS["v1"] and {commit for _, _, commit, _ in serve.asked} == {COMMITS["v1"]}
    assert checkpoint(f"org/tiny@{COMMITS['main']}").name == COMMITS["main"]
    with pytest.raises(InputError, match=r"^org/tiny: has no revision 'v9'; its branches"):
        checkpoint("org/tiny@v9")


def test_a_cut_connection_is_taken_up_where_it_was_cut(serve, checkpoint, content, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # 10 MB: more than the whole file
    name = "unet/diffusion_pytorch_model.safetensors"
    serve.cut[name] = [3000, 1000]
    folder = checkpoint("org/tiny")
    ranges = [asked for method, path, _, asked in serve.asked if path.endswith(name) and method == "GET"]
    assert ranges == [None, "bytes=1000-", "bytes=3000-"]
    assert (folder / name).read_bytes() == content[name]


def test_a_run_that_failed_goes_on_with_the_missing_files(serve, checkpoint, content, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    name = "unet/diffusion_pytorch_model.safetensors"
    serve.cut[name] = [0] * 20
    with pytest.raises(InputError, match=r"^org/tiny@main: .*the Hub cannot be asked \(.*; try again") as error:
        checkpoint("org/tiny")
    assert "\n" not in str(error.value)
    serve.cut.clear()
    serve.asked.clear()
    folder = checkpoint("org/tiny")
    assert name in serve.fetched() and not {"model_index.json", "unet/config.json"} & set(serve.fetched())
    assert (folder / name).read_bytes() == content[name]


@contextlib.contextmanager
def offline(monkeypatch):
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    huggingface_hub.close_session()
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = False
        huggingface_hub.close_session()


def test_offline(serve, checkpoint, monkeypatch, tmp_path):
    with offline(monkeypatch):
        with pytest.raises(InputError) as error:
            checkpoint("org/tiny@v1")
        cache = tmp_path / "cache"
        assert str(error.value) == (
            f"org/tiny@v1: no such file or folder here, it is not in the Hub's cache ({cache}), and HF_HUB_OFFLINE "
            "forbids to ask the Hub; unset HF_HUB_OFFLINE, or where there is one run `hf download org/tiny --revision "
            "v1 --local-dir FOLDER` and give FOLDER instead"
        )
    folder = checkpoint("org/tiny@v1")
    with offline(monkeypatch):
        serve.asked.clear()
        assert checkpoint("org/tiny@v1") == folder and serve.asked == []
        # A cache that another version of the library filled knows no listing.
        shutil.rmtree(folder.parents[1] / "trees")
        huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE.clear()
        assert checkpoint("org/tiny@v1") == folder
        (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
        with pytest.raises(InputError, match="unet/: no safetensors weights among .*; expected"):
            checkpoint("org/tiny@v1")


def test_no_way_to_the_hub(serve, tmp_path):
    options = {"endpoint": "http://127.0.0.1:9", "cache_dir": tmp_path}
    with pytest.raises(InputError, match=r"not in the Hub's cache .*cannot be asked \(.*refused.*FOLDER instead$"):
        hub.find("org/tiny", **options)


REFUSALS = {
    "private or none": ("org/secret", None, "org/secret: no such file or folder here, and no model org/secret on the"),
    "none": ("org/none@v1", None, "org/none@v1: no such file or folder here, and no model org/none on the Hub; if it"),
    "gated": ("org/tiny", ("/resolve/", 403, "GatedRepo"), "org/tiny: its authors ask for consent: accept the terms"),
    "wrong token": ("org/tiny", ("/api/", 401, ""), "no model org/tiny on the Hub|does not know your token"),
    "down": ("org/tiny", ("/tree/", 500, ""), "the Hub cannot be asked .*500"),
    "forbidden": ("org/tiny", ("/resolve/", 403, ""), "the Hub cannot be asked .*403"),
    "no name": ("org/a..b", None, "no name for a model on the Hub"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(serve, checkpoint, case, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    option, serve.refuse, message = REFUSALS[case]
    with pytest.raises(InputError, match=message) as error:
        checkpoint(option)
    assert "\n" not in str(error.value)


def test_no_room(serve, checkpoint, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(4_000_000, 2_000_000, 2_000_000))
    with pytest.raises(InputError, match=r"^org/tiny: needs [\d.]+ MB in .*cache, 2\.00 MB are free; set HF_HOME"):
        checkpoint("org/tiny")
    assert not [name for name in serve.fetched() if "safetensors" in name]


def test_a_disk_that_fills_up(serve, checkpoint, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(InputError, match=r"cache: no space left; set HF_HOME to a folder on a larger disk$"):
        checkpoint("org/tiny")


def test_what_cannot_be_built_is_refused_before_its_weights_are_fetched(serve, checkpoint, content):
    files = serve.files[COMMITS["main"]]
    unet = json.loads(files["unet/config.json"]) | {"in_channels": 7}
    files["unet/config.json"] = json.dumps(unet).encode()
    with pytest.raises(InputError, match="in_channels is 7"):
        checkpoint("org/tiny")
    assert not [name for name in serve.fetched() if "safetensors" in name]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "model_index.json",
            r"^org/tiny: not a checkpoint in diffusers' layout: has no model_index\.json.*hf download",
        ),
        ("text_encoder", r"^org/tiny: text_encoder/: no safetensors weights among .*pytorch_model\.bin"),
    ],
)
def test_repositories_without_what_is_read(serve, checkpoint, missing, message):
    files = serve.files[COMMITS["main"]]
    for name in [n for n in files if n.startswith(missing) and n.endswith((".safetensors", "index.json"))]:
        del files[name]
    with pytest.raises(InputError, match=message):
        checkpoint("org/tiny")
    assert not [name for name in serve.fetched() if "safetensors" in name]


def test_a_pickle_is_fetched_where_it_is_all_there_is_and_asked_for(serve, checkpoint, content):
    files = serve.files[COMMITS["main"]]
    for name in ("text_encoder/model.safetensors", "text_encoder/model.fp16.safetensors"):
        del files[name]
    checkpoint("org/tiny", pickles=True)
    weights = WEIGHTS - {"text_encoder/model.safetensors"} | {"text_encoder/pytorch_model.bin"}
    assert serve.fetched() == expected(content, weights)


@pytest.mark.parametrize(
    ("option", "is_id"),
    [
        *(("org/name", True), ("org/name@main", True), ("org/name@refs/pr/3", True), ("a-b_c.d/e.f-g", True)),
        *(("name", False), ("./org/name", False), ("/org/name", False), ("org/name/unet", False), ("../name", False)),
        *(("org/name@", False), ("models/sd.safetensors", False), ("models/SD.CKPT", False), ("~/name", False)),
    ],
)
def test_what_can_be_a_name_on_the_hub(option, is_id):
    assert hub.is_id(option) is is_id


def test_a_folder_goes_before_the_hub(checkpoint_folder, tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(checkpoint_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "find", lambda *_, **__: pytest.fail("asked the Hub"))
    assert locate.checkpoint("org/tiny") == (Path("org/tiny"), checkpoint_folder.name)
    assert locate.checkpoint("no/such/folder") == (Path("no/such/folder"), "folder")
