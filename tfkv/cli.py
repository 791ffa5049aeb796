"""The `tfkv` command. TensorFlow is loaded by the commands that need it, when they run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from tfkv import presets, terminal
from tfkv._version import __version__
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, TfkvError

if TYPE_CHECKING:
    from tfkv.serving import Client, Session
    from tfkv.serving.server import BatchingParameters, Server

#: Package -> the extra of this one that brings it.
_EXTRAS = {
    "tensorflow": "export,serve",
    "tensorflow_serving": "export,serve",
    "grpc_health": "serve",
    "keras": "export",
    "gguf": "export",
    "keras_hub": "keras-nlp",
    "prometheus_client": "metrics",
    "matplotlib": "eval",
}
_DEFAULT = EngineConfig()


class _Commands(typer.core.TyperGroup):
    """Prints errors of tfkv as one line with exit code 1; ``--debug`` shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TfkvError as error:
            message = str(error)
            if ctx.params.get("debug"):
                raise
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None or ctx.params.get("debug"):
                raise
            message = f"This command needs {error.name}. Install it: pip install 'tfkv[{extra}]'"
        terminal.notes().print(f"Error: {message}", style="red", soft_wrap=True)
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM sessions inside stock TensorFlow Serving: export, serve, talk, inspect.",
)

Directory = Annotated[
    pathlib.Path, typer.Argument(help="Version directory, or the model directory above it.")
]
Target = Annotated[
    str,
    typer.Option(help="host:port of the gRPC endpoint.", envvar="TFKV_TARGET", show_default=True),
]
Model = Annotated[str, typer.Option(help="Model name on the server.", envvar="TFKV_MODEL")]
Artifact = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="The artifact's directory: tokenizer, chat template, limits.", envvar="TFKV_ARTIFACT"
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=0, help="Most tokens to sample.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability mass kept, 1 = all.")]
TopK = Annotated[int, typer.Option(min=0, help="Most candidates, 0 = all.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Least share of the top probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="1 = none.")]
Adapter = Annotated[str, typer.Option(help="Adapter of the artifact, empty for the base.")]
Seed = Annotated[int | None, typer.Option(help="Random stream; drawn when left out.")]
Overflow = Annotated[str, typer.Option(help="When the session is full: error, stop or slide.")]
Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds a call may take, retries included.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
CalibrationFile = Annotated[
    pathlib.Path | None,
    typer.Option(exists=True, dir_okay=False, help="File of `tfkv calibrate`, of these weights."),
]
Source = Annotated[
    str, typer.Argument(help="A .gguf file, a folder of the Hugging Face Hub, or 'smollm2'.")
]
LayerCache = Annotated[
    list[str] | None,
    typer.Option(help="Layers with another codec or window, such as '0-1=int8'; give it for each."),
]
Weights = Annotated[
    str, typer.Option(help="What weight matrices are stored as: float32, bfloat16 or int8.")
]
TextFile = Annotated[
    pathlib.Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="UTF-8 text to read; Python's language reference by default.",
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and TensorFlow's own messages.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    del version
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0")


def _use_preset(context: typer.Context, name: str | None) -> None:
    """Makes a preset's fields the defaults of the command: options that are given win."""
    if name is not None:
        preset = presets.get(name)
        fields = {key: getattr(preset, key) for key in ("cache", "capacity", "slots")}
        sizes = ",".join(map(str, preset.batch_sizes))
        context.default_map = {**fields, "batch_sizes": sizes}


@app.command()
def export(
    source: Source,
    out: Annotated[pathlib.Path, typer.Argument(help="Model directory; a version is added.")],
    preset: Annotated[
        str | None,
        typer.Option(
            callback=_use_preset,
            is_eager=True,
            help="Cache, capacity, slots and batch sizes by use, such as 'chat': `tfkv presets`.",
        ),
    ] = None,
    cache: Annotated[
        str, typer.Option(help="Policy+codec, such as 'sliding_window(window=1024)+int8'.")
    ] = _DEFAULT.cache,
    layer_cache: LayerCache = None,
    slots: Annotated[int, typer.Option(help="Sessions held at once.")] = _DEFAULT.slots,
    capacity: Annotated[int, typer.Option(help="Most tokens a session stores.")] = (
        _DEFAULT.capacity
    ),
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = _DEFAULT.page_size,
    decode_chunk: Annotated[int, typer.Option(help="Most tokens a call samples.")] = (
        _DEFAULT.decode_chunk
    ),
    prefill_tokens: Annotated[int, typer.Option(help="Most prompt tokens of a call.")] = (
        _DEFAULT.prefill_tokens
    ),
    shared_prefill_tokens: Annotated[
        int, typer.Option(help="Most of them in a batch where others wait for their tokens.")
    ] = _DEFAULT.shared_prefill_tokens,
    batch_sizes: Annotated[str, typer.Option(help="Compiled batch sizes, ascending.")] = (
        ",".join(map(str, _DEFAULT.batch_sizes))
    ),
    batch_timeout_us: Annotated[int, typer.Option(help="Wait for batch mates, µs.")] = (
        _DEFAULT.batch_timeout_us
    ),
    max_enqueued_batches: Annotated[int, typer.Option(help="Batches that may wait.")] = (
        _DEFAULT.max_enqueued_batches
    ),
    history: Annotated[int, typer.Option(help="Tokens a session remembers, 0 = context.")] = (
        _DEFAULT.history
    ),
    ttl_ms: Annotated[int, typer.Option(help="Lifetime of an idle session, ms.")] = _DEFAULT.ttl_ms,
    scan_pages: Annotated[int, typer.Option(help="Pages attention reads at once.")] = (
        _DEFAULT.scan_pages
    ),
    pool_bytes: Annotated[
        str,
        typer.Option(
            "--pool-bytes", "--pool", help="Bytes of the page pool, such as 2GB; 0 = room for all."
        ),
    ] = str(_DEFAULT.pool_bytes),
    tenant_sessions: Annotated[
        int, typer.Option(help="Most sessions a tenant may hold, 0 = any number.")
    ] = _DEFAULT.tenant_sessions,
    weights: Weights = _DEFAULT.weights,
    speculation: Annotated[
        str,
        typer.Option(
            help="Check several guessed tokens in a step, such as 'prompt_lookup(tokens=7)', for "
            "answers that repeat their prompts."
        ),
    ] = _DEFAULT.speculation,
    xla: Annotated[bool, typer.Option(help="Compile with XLA.")] = _DEFAULT.xla,
    text: Annotated[
        bool, typer.Option("--text", help="Also `generate_text`, for callers without a tokenizer.")
    ] = _DEFAULT.text,
    calibration: CalibrationFile = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="LoRA that sessions may name, beside the base, such as legal=legal.lora.h5 "
            "(keras-nlp) or legal.safetensors; give it for each."
        ),
    ] = None,
) -> None:
    """Writes an artifact that TensorFlow Serving loads, and verifies it."""
    del preset
    adapters = _named_files("--adapter", adapter or [])
    engine = EngineConfig(
        cache=cache,
        slots=slots,
        capacity=capacity,
        page_size=page_size,
        decode_chunk=decode_chunk,
        prefill_tokens=prefill_tokens,
        shared_prefill_tokens=shared_prefill_tokens,
        batch_sizes=_numbers("--batch-sizes", batch_sizes),
        batch_timeout_us=batch_timeout_us,
        max_enqueued_batches=max_enqueued_batches,
        history=history,
        ttl_ms=ttl_ms,
        scan_pages=scan_pages,
        pool_bytes=_bytes("--pool-bytes", pool_bytes),
        tenant_sessions=tenant_sessions,
        layer_caches=tuple(layer_cache or ()),
        weights=weights,
        speculation=speculation,
        xla=xla,
        text=text,
    )
    terminal.load_tensorflow()
    from tfkv.export import export as write_artifact

    with terminal.Steps() as steps:
        version_dir = write_artifact(
            source, out, engine, calibration=calibration, adapters=adapters, progress=steps
        )
    typer.echo(str(version_dir))


@app.command("presets")
def show_presets(as_json: AsJson = False) -> None:
    """Shows the caches that have a name, for `tfkv export --preset`."""
    if as_json:
        found = [preset.to_dict() for preset in presets.PRESETS.values()]
        typer.echo(json.dumps(found, indent=1))
    else:
        terminal.output().print(terminal.presets_table(presets.PRESETS.values()))


def _named_files(option: str, pairs: list[str]) -> dict[str, str]:
    """Name to file of options ``name=file``."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path) or name in found:
            raise ConfigError(
                f"`{option}` must be name=file, each name once, such as legal=legal.lora.h5. "
                f"Received: {pair!r}."
            )
        found[name] = path
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise ConfigError(
            f"`{option}` must be numbers with commas between them, such as 1,2,4. "
            f"Received: {text!r}."
        ) from None


def _bytes(option: str, text: str) -> int:
    """Bytes of a size such as ``2GB``, ``512 MiB`` or ``1000000``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if found is None or (found[3] and not found[2]):
        raise ConfigError(
            f"`{option}` must be a size such as 2GB, 512MiB or 1000000. Received: {text!r}."
        )
    power = " KMGT".index(found[2] or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


@app.command()
def serve(
    directory: Annotated[
        pathlib.Path, typer.Argument(help="Model directory, polled for new versions.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port, 0 = a free one.")] = 8500,
    rest_port: Annotated[
        int, typer.Option(min=-1, max=65535, help="REST port, 0 = a free one, -1 = no REST.")
    ] = 8501,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="Model name clients ask for.")] = "tfkv",
    grpc_max_threads: Annotated[
        int, typer.Option(min=0, help="Threads that hold calls, 0 = 4 a CPU.")
    ] = 0,
    poll_seconds: Annotated[
        float, typer.Option(min=0, help="Look for versions so often, 0 = once.")
    ] = 1.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to finish calls at the end.")] = 30.0,
    enable_batching: Annotated[
        bool, typer.Option("--enable-batching", help="Batch as the server flag does; a test mode.")
    ] = False,
    batching_parameters_file: Annotated[
        pathlib.Path | None, typer.Option(help="Its parameters, a text-format proto.")
    ] = None,
    xla: Annotated[bool, typer.Option(help="Allow XLA to compile.")] = True,
) -> None:
    """Serves an artifact until SIGTERM or Ctrl-C, as TensorFlow Serving does."""
    if batching_parameters_file is not None and not enable_batching:
        raise ConfigError("`--batching-parameters-file` needs `--enable-batching`.")
    terminal.load_tensorflow(keras=False)
    from tfkv.serving.server import Server, run

    with terminal.Steps() as steps:
        _log_to(steps)
        server = Server(
            directory,
            name=name,
            host=host,
            port=port,
            rest_port=None if rest_port < 0 else rest_port,
            grpc_max_threads=grpc_max_threads,
            poll_seconds=poll_seconds,
            batching=_batching(batching_parameters_file) if enable_batching else None,
            progress=steps,
            xla_cpu_compilation_enabled=xla,
        )
        run(server, grace, on_ready=lambda server: _announce(server, steps))


def _batching(path: pathlib.Path | None) -> BatchingParameters:
    from tfkv.serving.server import BatchingParameters

    return BatchingParameters() if path is None else BatchingParameters.read(path)


def _announce(server: Server, steps: terminal.Steps) -> None:
    """One line on standard output once it answers, which `tfkv.serving.ServerProcess` reads."""
    steps.close()
    rest = "" if server.rest_port is None else f", REST {server.host}:{server.rest_port}"
    typer.echo(f"Serving {server.name}: gRPC {server.target}{rest}")
    sys.stdout.flush()


def _log_to(steps: terminal.Steps) -> None:
    """Log lines above the bars."""
    from rich.logging import RichHandler

    handler = RichHandler(console=steps.console, show_path=False, markup=False, highlighter=None)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("tfkv").setLevel(logging.INFO)


@contextlib.contextmanager
def _client(
    target: str, model: str, artifact: pathlib.Path | None, timeout: float = 120.0
) -> Iterator[Client]:
    from tfkv.serving import Client

    with Client(target, model, artifact=artifact, timeout=timeout) as client:
        yield client


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads standard input.")],
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    artifact: Artifact = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around it.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids", help="The prompt is token ids; so is the answer.")
    ] = (False),
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    adapter: Adapter = "",
    timeout: Timeout = 120.0,
    stats: Annotated[bool, typer.Option("--stats", help="Speed, to standard error.")] = False,
) -> None:
    """Answers one prompt; the answer streams to standard output."""
    from tfkv.serving import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with _client(target, model, None if ids else artifact, timeout) as client:
        given: Any = text
        if ids:
            given = _numbers("PROMPT", text)
        elif client.chat_template is not None and not raw:
            given = [{"role": "user", "content": text}]
        with client.session(adapter=adapter) as session:
            generation = session.start(given, sampling)
            terminal.stream(generation)
        if stats:
            terminal.notes().print(terminal.speed(generation.result))


@app.command()
def chat(
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    artifact: Artifact = None,
    system: Annotated[str | None, typer.Option(help="Instructions that open the talk.")] = None,
    adapter: Adapter = "",
    overflow: Overflow = "error",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    timeout: Timeout = 120.0,
) -> None:
    """Talks in one session: each turn computes only its own tokens.

    /reset starts over, /stats shows speed and bytes, /quit ends. Ctrl-C ends an answer.
    """
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    with _client(target, model, artifact, timeout) as client:
        if client.chat_template is None:
            raise ConfigError(
                "`tfkv chat` needs a chat template and a tokenizer: give --artifact DIR (or set "
                "TFKV_ARTIFACT) of an artifact that has both. `tfkv generate --ids` needs neither."
            )
        _Chat(client, sampling, system, adapter, overflow).run()


class _Chat:
    """The loop of `tfkv chat`."""

    def __init__(
        self,
        client: Client,
        sampling: dict[str, Any],
        system: str | None,
        adapter: str,
        overflow: str,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._system = system
        self._adapter = adapter
        self._overflow = overflow
        self._session = self._open()
        self._last = ""

    def _open(self) -> Session:
        return self._client.session(adapter=self._adapter, overflow=self._overflow)

    def run(self) -> None:
        """Reads lines until /quit or the end of the input; then the session is closed."""
        terminal.notes().print("/reset, /stats, /quit; Ctrl-C ends an answer", style="dim")
        try:
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if line in ("/quit", "/exit"):
                        break
                    self._command(line)
                elif line:
                    self._say(line)
        finally:
            self._session.__exit__(None, None, None)

    @staticmethod
    def _read() -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return None

    def _say(self, line: str) -> None:
        system = None if self._session.messages else self._system
        try:
            generation = self._session.chat(line, system=system, **self._sampling)
            try:
                terminal.stream(generation)
            except KeyboardInterrupt:
                generation.close()
            self._last = terminal.speed(generation.result)
        except TfkvError as error:  # the talk goes on: the transcript is still here
            terminal.notes().print(f"Error: {error}", style="red", soft_wrap=True)

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._session.__exit__(None, None, None)
            self._session = self._open()
            self._last = ""
            terminal.notes().print("A new session.", style="dim")
        elif line == "/stats":
            self._stats()
        else:
            terminal.notes().print(f"No command {line}. Known: /reset, /stats, /quit.")

    def _stats(self) -> None:
        show = terminal.notes().print
        if self._last:
            show(f"last answer: {self._last}")
        show(f"session: {self._session.position} tokens, {self._session.replays} replays")
        if self._client.manifest is not None:
            show(terminal.held(self._client.manifest, self._session.position))
        try:
            for name, value in self._client.stats().items():
                show(f"{name}: {value}")
        except TfkvError as error:
            show(f"Error: {error}", style="red", soft_wrap=True)


@app.command()
def inspect(
    directory: Directory,
    signature: Annotated[str | None, typer.Option(help="Inputs and outputs of this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows an artifact: model, cache, bytes a token and a session, signatures."""
    from tfkv import inspection

    if as_json:
        typer.echo(json.dumps(inspection.describe(directory), indent=1, ensure_ascii=False))
    else:
        terminal.output().print(inspection.render(directory, signature))


@app.command("plan")
def plan(
    model: Annotated[
        str, typer.Argument(help="Path of a .gguf file, 'smollm2', or an artifact's directory.")
    ],
    memory: Annotated[str, typer.Option(help="What the server may take, such as 4GB.")],
    cache: Annotated[str, typer.Option(help="Policy+codec.")] = _DEFAULT.cache,
    layer_cache: LayerCache = None,
    context: Annotated[int, typer.Option(help="Tokens of a session.")] = _DEFAULT.capacity,
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = _DEFAULT.page_size,
    history: Annotated[int, typer.Option(help="Tokens a session remembers, 0 = context.")] = (
        _DEFAULT.history
    ),
    weights: Weights = _DEFAULT.weights,
    as_json: AsJson = False,
) -> None:
    """Tells how many sessions fit into a memory budget, and what a version swap takes."""
    engine = EngineConfig(
        cache=cache,
        page_size=page_size,
        history=history,
        layer_caches=tuple(layer_cache or ()),
        weights=weights,
    )
    terminal.load_tensorflow()
    from tfkv.export import plan_memory
    from tfkv.export.importers import load
    from tfkv.manifest import Manifest, latest_version

    if pathlib.Path(model).is_dir():
        config = Manifest.read(latest_version(model)).model
        if config is None:
            raise ConfigError(
                f"{model} is an artifact of a Keras model, whose sessions are not on pages: "
                "`tfkv inspect` says what one takes."
            )
    else:
        config = load(model).config
    found = plan_memory(config, engine, context, _bytes("--memory", memory))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        terminal.output().print(terminal.plan_table(found.to_dict()))


@app.command()
def calibrate(
    source: Source,
    out: Annotated[pathlib.Path, typer.Argument(help="File to write, JSON.")],
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a passage.")] = 2048,
    passages: Annotated[int, typer.Option(help="Passages, spread over the text.")] = 4,
) -> None:
    """Reads text and writes which heads look far, for `caps`, and what codecs need of a model."""
    terminal.load_tensorflow()
    from tfkv.export import calibrate_model

    given = _text(text)
    with terminal.Steps() as steps:
        calibrate_model(source, out, given, tokens, passages, progress=steps)
    typer.echo(str(out))


def _text(path: pathlib.Path | None) -> str | None:
    """What a text file says."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"`--text` must be UTF-8. Received: {path} ({error}).") from error


@app.command("eval")
def evaluate(
    source: Source,
    cache: Annotated[list[str], typer.Option(help="Policy+codec; give it once for each.")],
    out: Annotated[pathlib.Path, typer.Option(help="Directory of eval.json and eval.html.")],
    layer_cache: LayerCache = None,
    text: TextFile = None,
    tokens: Annotated[
        list[int], typer.Option(help="Tokens of a passage; give it once for each length.")
    ] = [2048],  # noqa: B006
    passages: Annotated[int, typer.Option(help="Passages, spread over the text.")] = 4,
    continuations: Annotated[
        int, typer.Option(help="Passages continued greedily over 128 tokens, 0 = none.")
    ] = 2,
    task: Annotated[
        list[str], typer.Option(help="Kind of task, all or none; give it once for each.")
    ] = ["needle", "facts"],  # noqa: B006
    task_tokens: Annotated[
        list[int], typer.Option(help="Tokens of a task's context; give it once for each length.")
    ] = [1024],  # noqa: B006
    contexts: Annotated[int, typer.Option(help="Contexts of each kind and length.")] = 2,
    depths: Annotated[int, typer.Option(help="Places of facts in a context.")] = 5,
    baselines: Annotated[
        bool,
        typer.Option(help="Also measure windows of as many bytes, and evictions at random."),
    ] = True,
    weights: Weights = _DEFAULT.weights,
    calibration: CalibrationFile = None,
) -> None:
    """Measures what caches cost in quality: KL, top token, perplexity and tasks against bytes."""
    terminal.load_tensorflow()
    from tfkv.export import EvalPlan, evaluate_caches

    given = _text(text)
    plan = EvalPlan(
        tuple(tokens), passages, continuations, tuple(task), tuple(task_tokens), contexts, depths
    )
    with terminal.Steps() as steps:
        scores = evaluate_caches(
            source,
            cache,
            out,
            given,
            plan,
            baselines,
            calibration,
            tuple(layer_cache or ()),
            weights,
            progress=steps,
        )
    for table in terminal.scores_tables(scores):
        terminal.output().print(table)
    typer.echo(str(out / "eval.html"))


@app.command()
def verify(
    reference: Annotated[str, typer.Argument(help="Artifact's directory, or a cache of --model.")],
    candidate: Annotated[str, typer.Argument(help="Likewise: what is compared with it.")],
    model: Annotated[
        str | None, typer.Option(help="Path of a .gguf file, or 'smollm2', for caches.")
    ] = None,
    prompts: Annotated[
        pathlib.Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A prompt a line; in .jsonl, a JSON string or a list of token ids a line.",
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around them.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    min_agreement: Annotated[
        float | None, typer.Option(help="Least share of equal tokens, percent.")
    ] = None,
    min_first_divergence: Annotated[
        int | None, typer.Option(help="No answer may differ before this token.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Most mean KL, nats.")] = None,
    min_similarity: Annotated[
        float, typer.Option(help="Least mean cosine of the answers' sentence embeddings.")
    ] = 0.95,
    meaning: Annotated[bool, typer.Option(help="Compare sentence embeddings.")] = True,
    calibration: CalibrationFile = None,
    as_json: AsJson = False,
) -> None:
    """Tells whether two artifacts, or two caches of a model, answer alike.

    The exit code is 2 where a limit does not hold; which one is said on standard error.
    """
    terminal.load_tensorflow()
    from tfkv.consistency import PROMPTS, Limits, check_consistency, read_prompts

    limits = Limits(
        min_agreement, min_first_divergence, max_kl, min_similarity if meaning else None
    )
    with terminal.Steps() as steps:
        found = check_consistency(
            reference,
            candidate,
            model,
            PROMPTS if prompts is None else read_prompts(prompts),
            max_new_tokens=max_new_tokens,
            meaning=meaning,
            chat=not raw,
            calibration=calibration,
            progress=steps,
        )
    broken = limits.broken(found)
    if as_json:
        facts = {**found.to_dict(), "limits": dataclasses.asdict(limits), "broken": broken}
        typer.echo(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        terminal.output().print(terminal.agreement_table(found))
    for sentence in broken:
        terminal.notes().print(f"Not held: {sentence}.", style="red", soft_wrap=True)
    if broken:
        raise typer.Exit(2)


@app.command()
def bench(
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    artifact: Artifact = None,
    requests: Annotated[int, typer.Option(min=1, help="Sessions in all.")] = 32,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Sessions at a time, in a closed loop.")
    ] = 8,
    rate: Annotated[
        float, typer.Option(min=0, help="Sessions a second that begin; 0 = a closed loop.")
    ] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a turn's prompt.")] = 128,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens before it, the same in all sessions.")
    ] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens sampled in a turn.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and times.")] = 0,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Puts a load on a server: latencies, throughput, errors.

    Without --rate so many sessions are kept busy (closed loop); with it sessions begin at random
    times whatever the server does (open loop), and wait from when they were due. The exit code
    is 2 where a session failed.
    """
    from tfkv.serving import Load, run_load

    load = Load(requests, concurrency, rate, prompt_tokens, shared_tokens, new_tokens, turns, seed)
    with _client(target, model, artifact, timeout) as client, terminal.Steps() as steps:
        client.stats()  # An error of all sessions is one error.
        report = run_load(client, load, steps)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        terminal.output().print(terminal.load_table(report))
    for message, count in report.errors.items():
        terminal.notes().print(f"{count} sessions failed: {message}", style="red", soft_wrap=True)
    if report.errors:
        raise typer.Exit(2)


@app.command()
def stats(
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Shows the counters of a served artifact."""
    from tfkv.manifest import STATS

    with _client(target, model, None, timeout) as client:
        values = client.stats()
    if as_json:
        typer.echo(json.dumps(values, indent=1))
    else:
        terminal.output().print(terminal.stats_table(values, STATS))


@app.command()
def metrics(
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Its port, 0 = a free one.")] = 9464,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="Print the page and end.")] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Serves the counters of a served artifact as a Prometheus page.

    With --once the exit code is 1 where the artifact does not answer; the page is printed
    all the same.
    """
    from tfkv.serving import Client, Retry
    from tfkv.serving.metrics_bridge import MetricsBridge

    # No retries: Prometheus asks again, and wants to know meanwhile.
    with Client(target, model, timeout=timeout, retry=Retry(attempts=1)) as client:
        bridge = MetricsBridge(client)
        if once:
            typer.echo(bridge.render(), nl=False)
            raise typer.Exit(0 if bridge.up else 1)
        with terminal.Steps() as steps:
            _log_to(steps)
            stop = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            bridge.serve(port, host, on_ready=_announce_page, stop=stop)


sessions = typer.Typer(no_args_is_help=True, help="Keeps sessions as files, a file each.")
app.add_typer(sessions, name="sessions")
Sessions = Annotated[
    pathlib.Path, typer.Argument(help="Directory of the files.", metavar="DIR", file_okay=False)
]
Tenant = Annotated[str, typer.Option(help="Owner of the sessions.")]


@sessions.command("dump")
def dump_sessions(
    directory: Sessions,
    ids: Annotated[list[str], typer.Argument(help="Ids of the sessions.", metavar="ID...")],
    tenant: Tenant = "",
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    timeout: Timeout = 120.0,
) -> None:
    """Writes sessions of a served artifact to files, to load them after a restart."""
    from tfkv.serving import Client, SavedSession
    from tfkv.serving.saved_session import file_name

    directory.mkdir(parents=True, exist_ok=True)
    with Client(target, model, tenant=tenant, timeout=timeout) as client:
        for name in ids:
            path = directory / file_name(name)
            saved = SavedSession.fetch(client, name, path)
            typer.echo(f"{path}: {saved.held} tokens")


@sessions.command("load")
def load_sessions(
    directory: Sessions,
    ttl_ms: Annotated[int, typer.Option(min=0, help="Idle lifetime, 0 = the artifact's.")] = 0,
    tenant: Tenant = "",
    target: Target = "127.0.0.1:8500",
    model: Model = "tfkv",
    timeout: Timeout = 120.0,
) -> None:
    """Brings sessions of files back; the artifact must have the same weights and cache."""
    from tfkv.serving import Client, SavedSession
    from tfkv.serving.saved_session import SUFFIX

    with Client(target, model, tenant=tenant, timeout=timeout) as client:
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            saved = SavedSession.load(path)
            saved.restore(client, ttl_ms=ttl_ms)
            typer.echo(f"{saved.session_id}: {saved.held} tokens")


def _announce_page(address: str) -> None:
    typer.echo(f"Metrics: {address}")
    sys.stdout.flush()


def main() -> None:
    """Entry point of the `tfkv` command."""
    app()


if __name__ == "__main__":
    main()
