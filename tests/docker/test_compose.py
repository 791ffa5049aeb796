"""The container files, checked without a container engine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.server
import os
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import yaml

REQUIRED = {
    "--xla_cpu_compilation_enabled": "true",
    "--enable_batching": "false",
    "--enable_model_warmup": "true",
    "--max_num_load_retries": "0",
    "--port": "8500",
    "--rest_api_port": "8501",
}
PREDICT = "/tensorflow.serving.PredictionService/Predict"
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


@pytest.fixture(scope="module")
def folder(root: pathlib.Path) -> pathlib.Path:
    return root / "docker"


@pytest.fixture(scope="module")
def services(folder: pathlib.Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))["services"]


@pytest.fixture(scope="module")
def flags(services: dict[str, Any]) -> dict[str, str]:
    command = services["serving"]["command"]
    pairs = [argument.partition("=") for argument in command]
    assert all(separator for _, separator, _ in pairs), command
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return {name: value for name, _, value in pairs}


def test_every_flag_is_known_to_the_server(flags: dict[str, str]) -> None:
    listing = pathlib.Path(__file__).with_name("model_server_flags.txt").read_text(encoding="utf-8")
    known = {f"--{line}" for line in listing.splitlines() if line and not line.startswith("#")}
    assert set(flags) - known == set()


def test_flags_an_artifact_needs_are_set(flags: dict[str, str]) -> None:
    assert {name: flags[name] for name in REQUIRED} == REQUIRED
    assert int(resolved(flags["--grpc_max_threads"])) >= 32
    assert int(flags["--tensorflow_inter_op_parallelism"]) > 2


def resolved(value: str) -> str:
    """A compose value with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_every_flag_is_explained(folder: pathlib.Path) -> None:
    lines = [line.strip() for line in (folder / "compose.yaml").read_text().splitlines()]
    for index, line in enumerate(lines):
        if line.startswith("- --num_unload_threads"):  # explained with the line above it
            continue
        if line.startswith("- --"):
            assert lines[index - 1].startswith("#"), f"{line} has no comment"


def test_files_that_flags_name_are_mounted(
    folder: pathlib.Path, services: dict[str, Any], flags: dict[str, str]
) -> None:
    mounts = dict(
        resolved(volume).removesuffix(":ro").split(":") for volume in services["serving"]["volumes"]
    )
    inside = {target: source for source, target in mounts.items()}
    for name, value in flags.items():
        if name.endswith("_config_file"):
            assert (folder / inside[value]).is_file(), f"{name}={value} is not mounted"
    assert all(volume.endswith(":ro") for volume in services["serving"]["volumes"])


def test_images_are_pinned_and_ports_stay_on_loopback(services: dict[str, Any]) -> None:
    for service in services.values():
        tag = resolved(service["image"]).partition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), service["image"]
        assert service["deploy"]["resources"]["limits"]["memory"]
    for port in services["serving"]["ports"] + services["prometheus"]["ports"]:
        assert port.startswith("127.0.0.1:")


def test_model_configuration_parses(folder: pathlib.Path, services: dict[str, Any]) -> None:
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    text = (folder / "models.config").read_text(encoding="utf-8")
    parsed = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
    (model,) = parsed.model_config_list.config
    assert model.model_platform == "tensorflow"
    targets = [volume.split(":")[-2] for volume in services["serving"]["volumes"]]
    assert model.base_path in targets
    assert f"/v1/models/{model.name} " in services["serving"]["healthcheck"]["test"][-1]


def test_monitoring_configuration_parses(folder: pathlib.Path) -> None:
    from google.protobuf import text_format

    text = (folder / "monitoring.config").read_text(encoding="utf-8")
    parsed = text_format.Parse(text, monitoring_config())
    assert parsed.prometheus_config.enable
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in scraped["scrape_configs"]}
    job = jobs.pop("tensorflow-serving")
    assert job["metrics_path"] == parsed.prometheus_config.path
    assert job["static_configs"] == [{"targets": ["serving:8501"]}]
    (job,) = jobs.values()
    assert job["static_configs"] == [{"targets": ["metrics:9464"]}]


def test_metrics_container_runs_a_command_there_is(
    folder: pathlib.Path, services: dict[str, Any]
) -> None:
    import typer.main

    from tfkv._version import __version__
    from tfkv.cli import app

    metrics = services["metrics"]
    assert metrics["image"] == f"tfkv-metrics:{__version__}"
    name, *options = metrics["command"]
    known = {o for p in typer.main.get_command(app).commands[name].params for o in p.opts}
    assert {option.partition("=")[0] for option in options} <= known
    recipe = folder.parent / metrics["build"]["dockerfile"]
    copied = re.findall(r"^COPY (.+) \S+$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    for source in " ".join(copied).split():
        assert (folder.parent / source).exists(), source


def monitoring_config() -> Any:
    """An empty ``MonitoringConfig``, which tensorflow-serving-api leaves out.

    Fields as in tensorflow_serving/config/monitoring_config.proto.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="monitoring.proto", syntax="proto3")
    inner = file.message_type.add(name="PrometheusConfig")
    inner.field.add(name="enable", number=1, type=field.TYPE_BOOL, label=field.LABEL_OPTIONAL)
    inner.field.add(name="path", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    outer = file.message_type.add(name="MonitoringConfig")
    outer.field.add(
        name="prometheus_config",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".PrometheusConfig",
        label=field.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("MonitoringConfig"))()


def test_health_check_tells_loading_from_available(services: dict[str, Any]) -> None:
    script = services["serving"]["healthcheck"]["test"][-1]
    assert "$" not in script.replace("$$", ""), "compose would expand it"
    for state, healthy in (("LOADING", False), ("AVAILABLE", True)):
        with status_page(state) as port:
            result = subprocess.run(["bash", "-c", script.replace("8501", str(port))], timeout=10)
        assert (result.returncode == 0) == healthy, state


@contextlib.contextmanager
def status_page(state: str) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f'{{"model_version_status": [{{"state": "{state}"}}]}}'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_nginx_configuration_is_balanced(folder: pathlib.Path) -> None:
    text = (folder / "nginx.conf").read_text(encoding="utf-8")
    code = re.sub(r'"[^"]*"', '""', re.sub(r"#.*", "", text))
    depth = 0
    for statement in re.findall(r"[^{};]*[{};]", code):
        depth += {"{": 1, "}": -1, ";": 0}[statement[-1]]
        assert depth >= 0
        assert statement[-1] != "}" or not statement[:-1].strip(), f"no semicolon: {statement!r}"
    assert depth == 0
    assert "HandleReloadConfigRequest {" not in code


@pytest.fixture
def gateway(folder: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """A real nginx with the shipped file, in front of an echoing server; their addresses."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    listen, backend, rest, page = (free_port() for _ in range(4))
    text = (folder / "nginx.conf").read_text(encoding="utf-8")
    for old, new in {
        "/var/run/nginx.pid": f"{tmp_path}/nginx.pid",
        "server serving:8500": f"server 127.0.0.1:{backend}",
        "server serving:8501": f"server 127.0.0.1:{page}",
        "listen 9500": f"listen 127.0.0.1:{listen}",
        "listen 9501": f"listen 127.0.0.1:{rest}",
        "worker_processes auto": "worker_processes 1",
        "access_log off;": f"access_log off; client_body_temp_path {tmp_path};",
    }.items():
        assert old in text
        text = text.replace(old, new)
    shipped = tmp_path / "nginx.conf"
    shipped.write_text(text, encoding="utf-8")
    command = [nginx, "-p", str(tmp_path), "-c", str(shipped)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    server = subprocess.Popen([*command, "-g", "daemon off;"])
    try:
        wait_for(listen)
        yield f"127.0.0.1:{listen}", f"127.0.0.1:{backend}"
    finally:
        server.terminate()
        server.wait(timeout=10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


def call(target: str, method: str, payload: bytes) -> bytes:
    with grpc.insecure_channel(target) as channel:
        return channel.unary_unary(method)(payload, timeout=10)


def test_gateway_passes_predict_and_refuses_reload(gateway: tuple[str, str]) -> None:
    front, backend = gateway
    with pytest.raises(grpc.RpcError) as failure:
        call(front, PREDICT, b"ids")
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[Echo()])
    assert server.add_insecure_port(backend) != 0
    server.start()
    try:
        payload = os.urandom(200_000)
        assert call(front, PREDICT, payload) == payload
        with pytest.raises(grpc.RpcError) as failure:
            call(front, RELOAD, b"config")
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as failure:
            call(front, PREDICT, b"x" * 1_500_000)
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        server.stop(None)
