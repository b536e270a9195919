"""tritonclient[http], unchanged, against the application over a real socket."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.ranking import FakeRanker, fake_outputs, fake_rankers
from plait_disagg.errors import Busy
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService
from support.app_server import AppServer
from support.http_rank import arrays, datatype

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")


class Server(AppServer):
    """A server that only ranks, with a fake ranker."""

    def __init__(self):
        self.ranker = FakeRanker()
        super().__init__(create_app(None, HttpSettings(), ranking=LocalRankingService(fake_rankers(self.ranker))))


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def client(server):
    server.ranker.ranked.clear()
    server.ranker.error = server.ranker.missing = None
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as connected:
        yield connected


def tensors(sent, *, binary):
    """The client's own objects."""
    made = []
    for name, array in sent.items():
        made.append(triton.InferInput(name, list(array.shape), datatype(array)))
        made[-1].set_data_from_numpy(array, binary_data=binary)
    return made


def test_health_and_metadata(server, client):
    """Live, ready, the server's and the model's metadata."""
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("picks")
    assert client.is_model_ready("picks", "1")
    assert not client.is_model_ready("nope")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("picks")
    assert {tensor["name"] for tensor in about["inputs"]} == set(arrays())
    server.ranker.missing = "starting"
    assert not client.is_server_ready()
    assert not client.is_model_ready("picks")


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True, None])
def test_infer_in_every_combination_of_forms(server, client, binary_in, binary_out):
    """JSON and binary in and out; without named outputs (None) the client asks for all of them in binary."""
    sent = arrays(7)
    names = ("score", "parts")
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
    answer = client.infer("picks", tensors(sent, binary=binary_in), outputs=outputs, request_id="r-1")
    (request,) = server.ranker.ranked
    for name, values in fake_outputs(request).items():
        np.testing.assert_array_equal(answer.as_numpy(name), values.numpy())
    assert answer.get_response()["id"] == "r-1"
    for name, array in sent.items():
        np.testing.assert_array_equal(request.tensors[name].numpy(), array)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression_a_version_and_a_timeout_are_understood(server, client, encoding):
    """The request is packed, the answer need not be; and the client's own ways of naming a version and a deadline."""
    how = {"request_compression_algorithm": encoding, "response_compression_algorithm": encoding}
    answer = client.infer("picks", tensors(arrays(7), binary=True), model_version="1", timeout=30_000_000, **how)
    assert answer.as_numpy("score").shape == (7,)
    assert server.ranker.ranked[0].deadline_s is not None


def test_errors_are_read_by_the_client(server, client):
    """Our sentence is the exception's message, for a bad value, an unknown model, and a full queue."""
    with pytest.raises(triton.InferenceServerException, match="item: id 99 at position 0"):
        client.infer("picks", tensors(arrays(1) | {"item": np.array([99])}, binary=True))
    with pytest.raises(triton.InferenceServerException, match="there is no model 'nope'"):
        client.infer("nope", tensors(arrays(), binary=False))
    with pytest.raises(triton.InferenceServerException, match="no version '9'"):
        client.get_model_metadata("picks", "9")
    server.ranker.error = Busy("too many requests wait")
    with pytest.raises(triton.InferenceServerException, match="too many requests wait"):
        client.infer("picks", tensors(arrays(), binary=True))
