"""REST as TF Serving's clients know it, case by case, on our server and, where it is installed, on the real one."""

import base64
import json
import math

import pytest

BYTES = b"\xfb\xff\x00end"  # base64 of it needs + and /
B64 = base64.b64encode(BYTES).decode()
TOY = "/v1/models/toy"
PREDICT = f"{TOY}:predict"


def cases(table):
    """Rows (id, *values) as arguments of parametrize."""
    return {"argvalues": [row[1:] for row in table], "ids": [row[0] for row in table]}


def sig(name, **body):
    return {"signature_name": name, **body}


# (id, path, body, answer)
ANSWERS = [
    ("row", PREDICT, {"instances": [2.0, 4.0]}, {"predictions": [4.0, 5.0]}),
    ("row_named", PREDICT, {"instances": [{"x": 2.0}, {"x": 4.0}]}, {"predictions": [4.0, 5.0]}),
    ("column", PREDICT, {"inputs": [2.0, 4.0]}, {"outputs": [4.0, 5.0]}),
    ("column_named", PREDICT, {"inputs": {"x": [2.0, 4.0]}}, {"outputs": [4.0, 5.0]}),
    ("column_more", PREDICT, {"inputs": {"x": [2.0], "other": "ignored"}}, {"outputs": [4.0]}),
    ("more_keys", PREDICT, {"inputs": [2.0], "other": 1}, {"outputs": [4.0]}),
    ("whole_numbers", PREDICT, {"instances": [2, 4]}, {"predictions": [4.0, 5.0]}),
    ("empty_signature", PREDICT, sig("", instances=[2.0]), {"predictions": [4.0]}),
    ("signature", PREDICT, sig("serving_default", instances=[2.0]), {"predictions": [4.0]}),
    ("version", f"{TOY}/versions/1:predict", {"instances": [2.0]}, {"predictions": [3.0]}),
    ("label", f"{TOY}/labels/stable:predict", {"instances": [2.0]}, {"predictions": [3.0]}),
    ("other_label", f"{TOY}/labels/canary:predict", {"instances": [2.0]}, {"predictions": [4.0]}),
    ("case", "/V1/Models/toy/Versions/1:PREDICT", {"instances": [2.0]}, {"predictions": [3.0]}),
    ("escaped", "/v1/models/%74oy:predict", {"instances": [2.0]}, {"predictions": [4.0]}),
    (
        *("rows_of_two", PREDICT, sig("two", instances=[{"a": 1.5, "b": 1}, {"a": 2.5, "b": 2}])),
        {"predictions": [{"a": 1.5, "b": 2}, {"a": 2.5, "b": 3}]},
    ),
    ("columns_of_two", PREDICT, sig("two", inputs={"a": [1.5], "b": [1]}), {"outputs": {"a": [1.5], "b": [2]}}),
    ("uneven_rest", PREDICT, sig("two", inputs={"a": [1.5], "b": [1, 2]}), {"outputs": {"a": [1.5], "b": [2, 3]}}),
    ("scalar", PREDICT, sig("scalar", inputs={"n": 6, "x": [1.5]}), {"outputs": {"n": 7, "x": [1.5]}}),
    ("matrix", PREDICT, sig("matrix", instances=[[1.0, 2.0], [3.0, 4.0]]), {"predictions": [[1.0, 2.0], [3.0, 4.0]]}),
    ("empty_rows", PREDICT, sig("matrix", inputs=[[], []]), {"outputs": [[], []]}),
    (
        *("kinds", PREDICT, sig("kinds", inputs={"i": [-1], "l": [2**62], "u": [255], "d": [0.1], "flag": [True]})),
        {"outputs": {"i_out": [-1], "l_out": [2**62], "u_out": [255], "d_out": [0.1], "flag_out": [True]}},
    ),
    ("b64", PREDICT, sig("bytes", instances=[{"b64": B64}]), {"predictions": [{"b64": B64}]}),
    ("b64_column", PREDICT, sig("bytes", inputs={"s": [{"b64": B64}]}), {"outputs": [{"b64": B64}]}),
    ("b64_named", PREDICT, sig("bytes", instances=[{"s": {"b64": B64}}]), {"predictions": [{"b64": B64}]}),
    ("plain_bytes", PREDICT, sig("bytes", instances=["ab"]), {"predictions": [{"b64": "YWI="}]}),
    ("text", PREDICT, sig("text", instances=["gr\u00fcn", ""]), {"predictions": ["gr\u00fcn", ""]}),
    ("b64_to_text", PREDICT, sig("text", instances=[{"b64": "YWI="}]), {"predictions": ["ab"]}),
    (
        "classify",
        f"{TOY}:classify",
        sig("classify", examples=[{"x": 2.0}]),
        {"results": [[["plus", 2.0], ["minus", -2.0]]]},
    ),
    ("regress", f"{TOY}:regress", sig("regress", examples=[{"x": 2.0}, {"x": [4.0]}]), {"results": [4.0, 5.0]}),
    ("context", f"{TOY}:regress", sig("regress", context={"x": 4.0}, examples=[{"y": 1}]), {"results": [5.0]}),
]


@pytest.mark.parametrize(("path", "body", "expected"), **cases(ANSWERS))
def test_answers(server, path, body, expected):
    code, answer = server.rest("POST", path, body)
    assert (code, json.loads(answer)) == (200, expected)


# (id, path, body, status, what the error holds)
ERRORS = [
    ("empty", PREDICT, b"", 400, "JSON Parse error"),
    ("no_json", PREDICT, b"{", 400, "JSON Parse error"),
    ("no_object", PREDICT, [1], 400, "object"),
    ("deep", PREDICT, b"[" * 2000, 400, "JSON Parse error"),
    ("neither", PREDICT, {}, 400, "Missing 'inputs' or 'instances' key"),
    ("both", PREDICT, {"inputs": [1], "instances": [1]}, 400, "one of 'inputs' or 'instances'"),
    ("no_list", PREDICT, {"instances": 1.0}, 400, "list/array"),
    ("no_rows", PREDICT, {"instances": []}, 400, "No values in 'instances' array"),
    ("signature_type", PREDICT, sig(1, instances=[1]), 400, "'signature_name' key must be a string value"),
    ("signature", PREDICT, sig("no", instances=[1]), 400, "not found in signature def"),
    ("row_key", PREDICT, {"instances": [{"z": 1.0}]}, 400, "Failed to process element: 0"),
    ("row_more", PREDICT, {"instances": [{"x": 1.0, "z": 1.0}]}, 400, "Failed to process element: 0"),
    ("row_less", PREDICT, sig("two", instances=[{"a": 1.0}]), 400, "keys must be equal to: a,b"),
    ("row_plain", PREDICT, sig("two", instances=[1.0]), 400, "instances is a plain list"),
    ("row_mixed", PREDICT, {"instances": [{"x": 1.0}, 1.0]}, 400, "at item 1 of input list"),
    ("row_mixed_too", PREDICT, {"instances": [1.0, {"x": 1.0}]}, 400, "at item 1 of input list"),
    ("row_shapes", PREDICT, sig("matrix", instances=[[1.0], [1.0, 2.0]]), 400, "Failed to process element: 1"),
    ("row_scalar", PREDICT, sig("scalar_out", instances=[1.0]), 400, ""),
    ("row_sizes", PREDICT, sig("uneven", instances=[1.0]), 400, "inconsistent batch size"),
    ("column_missing", PREDICT, sig("two", inputs={"a": [1.0]}), 400, "Missing named input: b in 'inputs' object."),
    ("column_plain", PREDICT, sig("two", inputs=[1.0]), 400, "inputs is a plain value/list"),
    ("ragged", PREDICT, sig("matrix", inputs=[[1.0], [1.0, 2.0]]), 400, "Encountered list at unexpected size"),
    ("level", PREDICT, sig("matrix", inputs=[[1.0], 2.0]), 400, ""),
    ("too_deep", PREDICT, sig("matrix", inputs=[[1.0, [2.0]]]), 400, ""),
    ("float_for_int", PREDICT, sig("two", inputs={"a": [1.0], "b": [1.0]}), 400, "is not of expected type: int32"),
    ("int_range", PREDICT, sig("two", inputs={"a": [1.0], "b": [2**31]}), 400, "is not of expected type: int32"),
    ("string", PREDICT, {"instances": ["1.0"]}, 400, "is not of expected type: float"),
    ("null", PREDICT, {"instances": [None]}, 400, "is not of expected type: float"),
    ("bool", PREDICT, {"instances": [True]}, 400, "is not of expected type: float"),
    ("lossy", PREDICT, {"instances": [2**25]}, 400, "without loss of precision"),
    ("large", PREDICT, {"instances": [1e39]}, 400, "without loss of precision"),
    ("b64_broken", PREDICT, sig("bytes", instances=[{"b64": "*"}]), 400, "Unable to base64 decode"),
    ("b64_object", PREDICT, sig("bytes", inputs={"s": [{"b64": B64, "x": 1}]}), 400, "base64"),
    ("b64_number", PREDICT, {"instances": [{"b64": B64}]}, 400, "is not of expected type: float"),
    ("half_column", PREDICT, sig("half_in", inputs=[1.5]), 501, "to type: half"),
    ("half_row", PREDICT, sig("half_in", instances=[1.5]), 400, "to type: half"),
    ("half_out", PREDICT, sig("half_out", inputs=[1.5]), 400, ""),
    ("shape", PREDICT, sig("fixed", inputs=[1.0, 2.0, 3.0]), 400, ""),
    ("xla", PREDICT, sig("compiled", inputs=[1.0]), 500, "XLA compilation disabled"),
    ("model", "/v1/models/no:predict", {"instances": [1.0]}, 404, "Servable not found for request: Latest(no)"),
    (
        "version",
        f"{TOY}/versions/9:predict",
        {"instances": [1.0]},
        404,
        "Servable not found for request: Specific(toy, 9)",
    ),
    ("label", f"{TOY}/labels/no:predict", {"instances": [1.0]}, 400, "Unrecognized servable version label: no"),
    ("long_version", f"{TOY}/versions/{10**20}:predict", {"instances": [1.0]}, 400, "Failed to convert version"),
    ("endless_version", f"{TOY}/versions/{'9' * 5000}:predict", {"instances": [1.0]}, 400, "Failed to convert version"),
    ("no_number", f"{TOY}/versions/one:predict", {"instances": [1.0]}, 400, "Malformed request: POST"),
    ("method", f"{TOY}:draw", {"instances": [1.0]}, 400, f"Malformed request: POST {TOY}:draw"),
    ("no_method", TOY, {"instances": [1.0]}, 400, f"Malformed request: POST {TOY}"),
    ("both_choices", f"{TOY}/versions/1/labels/stable:predict", {"instances": [1.0]}, 400, "Malformed request"),
    ("dots", "/v1/models/%2e%2e%2ftoy:predict", {"instances": [1.0]}, 404, "Servable not found"),
    ("slash", "/v1/models/..%2f..%2fetc:predict", {"instances": [1.0]}, 404, "Servable not found"),
    ("twice_escaped", "/v1/models/%2574oy:predict", {"instances": [1.0]}, 404, "Servable not found"),
    ("nul", "/v1/models/toy%00:predict", {"instances": [1.0]}, 404, "Servable not found"),
    ("examples", f"{TOY}:classify", {"instances": [1.0]}, 400, "'examples'"),
    ("no_examples", f"{TOY}:classify", {"examples": []}, 400, "'examples'"),
    ("for_tensors", f"{TOY}:classify", {"examples": [{"x": 1.0}]}, 400, ""),
]


@pytest.mark.parametrize(("path", "body", "status", "fact"), **cases(ERRORS))
def test_errors(server, path, body, status, fact):
    code, answer = server.rest("POST", path, body)
    error = json.loads(answer)
    assert (code, list(error)) == (status, ["error"])
    assert fact in error["error"] and "Traceback" not in error["error"]


def test_numbers_that_json_has_not(server):
    """NaN and the infinities come and go as bare words, as TF Serving writes them."""
    code, answer = server.rest("POST", PREDICT, sig("special", inputs=[0.0, 1.0, -1.0]))
    assert code == 200 and all(word in answer for word in (b"NaN", b" Infinity", b"-Infinity"))
    values = json.loads(answer)["outputs"]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf]
    assert server.rest("POST", PREDICT, b'{"instances": [Infinity, -Infinity]}')[0] == 200


def test_a_content_type_is_not_examined(server):
    assert server.rest("POST", PREDICT, {"instances": [2.0]}, {"Content-Type": "text/plain"})[0] == 200


def test_status(server):
    code, answer = server.rest("GET", f"{TOY}/versions/1")
    status = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    assert (code, json.loads(answer)) == (200, {"model_version_status": [status]})
    found = json.loads(server.rest("GET", TOY)[1])["model_version_status"]
    assert {(v["version"], v["state"]) for v in found} == {("1", "AVAILABLE"), ("2", "AVAILABLE")}
    assert json.loads(server.rest("GET", f"{TOY}/labels/stable")[1])["model_version_status"][0]["version"] == "1"


def test_metadata(server):
    code, answer = server.rest("GET", f"{TOY}/versions/1/metadata")
    found = json.loads(answer)
    assert code == 200 and found["model_spec"] == {"name": "toy", "signature_name": "", "version": "1"}
    signature = found["metadata"]["signature_def"]["signature_def"]["matrix"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    tensor = signature["inputs"]["x"]
    assert tensor["dtype"] == "DT_FLOAT" and tensor["name"].startswith("matrix_x")
    assert [d["size"] for d in tensor["tensor_shape"]["dim"]] == ["-1", "-1"]


GET_ERRORS = [
    ("no_name", "GET", "/v1/models", 400),
    ("model", "GET", "/v1/models/no", 404),
    ("model_metadata", "GET", "/v1/models/no/metadata", 404),
    ("version", "GET", f"{TOY}/versions/9", 404),
    ("malformed", "GET", f"{TOY}/weights", 400),
    ("get_predict", "GET", PREDICT, 400),
    ("put", "PUT", PREDICT, 400),
    ("delete", "DELETE", TOY, 400),
    ("elsewhere", "GET", "/models/toy", 404),
    ("root", "GET", "/", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), **cases(GET_ERRORS))
def test_other_requests(server, method, path, status):
    code, answer = server.rest(method, path)
    assert code == status
    if path.startswith("/v1/"):
        assert list(json.loads(answer)) == ["error"]


def test_monitoring(server):
    server.rest("POST", PREDICT, {"instances": [1.0]})
    code, page = server.rest("GET", "/monitoring/prometheus/metrics")
    assert code == 200 and b"# TYPE" in page and b":tensorflow:serving:request_count" in page


def test_published_clients_draw_over_rest(server):
    """Columns, signatures by default, and names of tensors: all that a client of the published SavedModels knows."""

    def call(model, inputs):
        code, answer = server.rest("POST", f"/v1/models/{model}:predict", {"inputs": inputs})
        assert code == 200, answer
        return json.loads(answer)["outputs"]

    contexts = call("text_encoder", [[49406, 320, 736, 3055] + [49407] * 73])
    assert contexts.keys() == {"context", "unconditional_context"}
    latent = call("diffusion_model", contexts | {"num_steps": 2, "unconditional_guidance_scale": 7.5})
    pictures = call("decoder", latent)
    assert len(pictures) == 4 and len(pictures[0]) == 18 and len(pictures[0][0]) == 14
    assert all(type(v) is int and 0 <= v <= 255 for row in pictures[0] for pixel in row for v in pixel)
    png = call("decoder", latent) and server.rest(
        "POST", "/v1/models/decoder:predict", sig("decode_png", inputs={"latent": latent})
    )
    files = [base64.b64decode(item["b64"]) for item in json.loads(png[1])["outputs"]]
    assert all(file.startswith(b"\x89PNG") for file in files)
