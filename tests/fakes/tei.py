"""A fake of text-embeddings-inference, after its documentation and source; its model is a hash of the text.

    python -m tests.fakes.tei --port 8085 --delay-ms 20        its own process; prints the port
    async with FakeTei(Script(delay_ms=20)) as server: ...     or in this one

Each word is a token, and a text has two special ones. Answers depend on the tokens, so a row for the wrong caller is
detected. A text with the word `poison-item` fails its whole call (424), `nan-item` makes its row NaN, `slow-item` takes
`slow_ms`, and `die-item` ends the process during its call. GET /control reports the calls so far, POST /control changes
the script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import orjson
from aiohttp import web

from shoal.types import Array
from tests.fakes.closing import close
from tests.fakes.tei_model import CLS, SEP, VOCABULARY, Script, draw, ids_of, word_id

PERMITS_UP_FRONT = frozenset({"/embed", "/embed_all", "/embed_sparse", "/v1/embeddings"})


@dataclass(slots=True)
class Call:
    """One call of a model's route. `status` is 0 while it runs, and if its caller left (`aborted`). `started_at` and
    `ended` are Unix seconds."""

    path: str
    inputs: list[Any]
    options: dict[str, Any]
    status: int = 0
    aborted: bool = False
    started_at: float = field(default_factory=time.time)
    ended: float = 0.0


class Refusal(Exception):
    """An error in the form of the server's response."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.status, self.kind, self.text = status, kind, text


class FakeTei:
    """The server. Inside this process it can be paused: no call is answered while `gate` is not set."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.calls: list[Call] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.looks = 0
        self.port = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.info_gate = asyncio.Event()
        """Until it is set, /info does not answer."""
        self.info_gate.set()
        self.alone = False
        """It has a process of its own, which it may end."""
        self._permits = 0
        self.most_permits = 0
        self._arrived = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"tei+http://{self.target}"

    def change(self, **changes: Any) -> None:
        self.script = replace(self.script, **changes)

    async def call(self, number: int = 1) -> Call:
        """Wait for and return the call of that number."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= number)
        return self.calls[number - 1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen, on the earlier port if there was one."""
        app = web.Application(client_max_size=2**31)
        routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "/embed": self._model,
            "/embed_all": self._model,
            "/embed_sparse": self._model,
            "/predict": self._model,
            "/rerank": self._model,
            "/tokenize": self._tokenize,
            "/decode": self._decode,
            "/control": self._post_control,
        }
        for path, endpoint in routes.items():
            app.router.add_post(path, endpoint)
        app.router.add_get("/info", self._info)
        app.router.add_get("/health", self._health)
        app.router.add_get("/control", self._get_control)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, "127.0.0.1", self.port or port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None and self._listener is not None:
            await close(self._listener)
            await self._runner.cleanup()
            self._runner = self._listener = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.script.unhealthy:
            return _answer({"error": "unhealthy", "error_type": "Unhealthy"}, 503)
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        self.looks += 1
        await self.info_gate.wait()
        if not self._is_authorized(request):
            return web.Response(status=401)
        script = self.script
        names = script.label_names
        labels = {
            "id2label": {str(at): name for at, name in enumerate(names)},
            "label2id": {name: at for at, name in enumerate(names)},
        }
        pooling = "splade" if script.kind == "splade" else script.pooling
        kind = (
            {script.kind: labels} if script.kind in ("reranker", "classifier") else {"embedding": {"pooling": pooling}}
        )
        return _answer(
            {
                "model_id": script.model_id,
                "model_sha": script.model_sha or None,
                "model_dtype": "float32",
                **({"served_model_name": script.model_id} if script.new else {}),
                "model_type": kind,
                "max_concurrent_requests": script.max_concurrent_requests,
                "max_input_length": script.max_input_length,
                "max_batch_tokens": script.max_batch_tokens,
                "max_batch_requests": None,
                "max_client_batch_size": script.max_client_batch_size,
                "auto_truncate": script.new,
                "tokenization_workers": 4,
                "version": "1.9.3" if script.new else "1.8.0",
                "sha": None,
                "docker_label": None,
            }
        )

    async def _get_control(self, request: web.Request) -> web.Response:
        model = [call for call in self.calls if call.path not in ("/tokenize", "/decode")]
        return _answer(
            {
                "calls": len(model),
                "inputs": sum(len(call.inputs) for call in model),
                "sizes": [len(call.inputs) for call in model],
                "statuses": [call.status for call in model],
                "aborted": sum(call.aborted for call in self.calls),
                "in_flight": self.in_flight,
                "most_in_flight": self.most_in_flight,
                "first_at": min((call.started_at for call in model), default=0.0),
                "last_at": max((call.ended for call in model), default=0.0),
                "most_permits": self.most_permits,
            }
        )

    async def _post_control(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.pop("die", False):
            os._exit(1)
        if body.pop("forget", False):
            self.calls, self.most_in_flight, self.most_permits = [], 0, 0
        self.change(**body)
        return web.Response()

    def _is_authorized(self, request: web.Request) -> bool:
        key = self.script.api_key
        return not key or request.headers.get("authorization") == f"Bearer {key}"

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if not self._is_authorized(request):
            raise Refusal(401, "", "")
        if request.content_type != "application/json":
            raise Refusal(415, "", "Expected request with `Content-Type: application/json`")
        data = await request.read()
        if len(data) > self.script.payload_limit:
            raise Refusal(413, "", "Failed to buffer the request body: length limit exceeded")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refusal(400, "", f"Failed to parse the request body as JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refusal(422, "", "Failed to deserialize the JSON body into the target type: invalid type")
        return body

    async def _model(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, [], {})
        try:
            body = await self._body(request)
            call.options = {name: value for name, value in body.items() if name not in ("inputs", "query", "texts")}
            call.inputs = _inputs(request.path, body)
            async with self._arrived:
                self.calls.append(call)
                self._arrived.notify_all()
            response = await self._run(call, request)
        except Refusal as refusal:
            response = _error_response(refusal)
        except asyncio.CancelledError:
            call.aborted = True
            raise
        call.status, call.ended = response.status, time.time()
        return response

    async def _run(self, call: Call, request: web.Request) -> web.Response:
        script, count = self.script, len(call.inputs)
        self._check_size(count)
        taken = min(count, script.max_concurrent_requests - self._permits)
        overloaded = taken < count
        if overloaded and call.path in PERMITS_UP_FRONT:
            raise Refusal(429, "Overloaded", "Model is overloaded")
        self._permits += taken
        self.most_permits = max(self.most_permits, self._permits)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self._check_kind(call)
            items = [self._read(item, call.options) for item in call.inputs]
            await self._work(call.inputs, request.transport)
            if overloaded:  # /predict and /rerank acquire permits one by one: started items run to the end
                raise Refusal(429, "Overloaded", "Model is overloaded")
            return self._respond(call, items)
        finally:
            self._permits -= taken
            self.in_flight -= 1

    async def _work(self, inputs: list[Any], transport: Any) -> None:
        """Simulate the work: wait or fail. `abort` closes `transport`."""
        words = {word for item in inputs for word in _words(item)}
        await self.gate.wait()
        slow = self.script.slow_ms if "slow-item" in words else 0.0
        if seconds := (self.script.delay_ms + slow) / 1e3:
            await asyncio.sleep(seconds)
        if "die-item" in words:
            if self.alone:
                os._exit(1)
            assert transport is not None
            transport.abort()
        if self.script.misbehaves.isdigit():
            raise Refusal(int(self.script.misbehaves), "Backend", "Backend error: the device said no")
        if "poison-item" in words:
            raise Refusal(424, "Backend", "Backend error: the device said no")

    def _check_size(self, count: int) -> None:
        limit = self.script.max_client_batch_size
        if count > limit:
            raise self._invalid(f"batch size {count} > maximum allowed batch size {limit}")

    def _check_kind(self, call: Call) -> None:
        """Check in the order of the original."""
        kind, path = self.script.kind, call.path
        dense = path in ("/embed", "/embed_all")
        wrong = ""
        if path == "/embed" and kind == "splade" and call.options.get("normalize", True):
            wrong = "`normalize` is not available for SPLADE models"
        elif dense and kind in ("reranker", "classifier"):
            wrong = "Model is not an embedding model"
        elif path == "/embed_all" and kind == "splade":
            wrong = "`embed_all` is not available for SPLADE models"
        elif path == "/embed_sparse" and kind != "splade":
            wrong = "Model is not an embedding model with SPLADE pooling"
        elif path == "/predict" and kind in ("embedding", "splade"):
            wrong = "Model is not a classifier model"
        elif path == "/rerank" and kind != "reranker":
            wrong = "model is not a re-ranker model"
        if wrong:
            raise Refusal(424, "Backend", f"Backend error: {wrong}")
        if call.options.get("dimensions") == 0:
            raise self._invalid("Input validation error: `dimensions` should be positive")

    def _read(self, item: Any, options: dict[str, Any]) -> Any:
        """Return an item with its prompt, truncated. Raises Refusal as the tokenizer would."""
        script = self.script
        item = self._add_prompt(item, options.get("prompt_name"))
        if not item or item == ("", ""):
            raise Refusal(400, "Empty", "Input validation error: `inputs` cannot be empty")
        ids, limit = ids_of(item, 10**9), script.max_input_length
        truncate = options.get("truncate")
        if len(ids) > limit and not (script.new if truncate is None else truncate):
            raise self._invalid(
                f"Input validation error: `inputs` must have less than {limit} tokens. Given: {len(ids)}"
            )
        return item, ids_of(item, limit, (options.get("truncation_direction") or "right").lower())

    def _add_prompt(self, item: Any, name: str | None) -> Any:
        prompts = json.loads(self.script.prompts)
        if name is not None and name not in prompts:
            listed = f"it was not found in the Sentence Transformers prompts. Available prompts: {list(prompts)}"
            why = listed if prompts else "no prompts were found in the Sentence Transformers configuration"
            raise self._invalid(f"Input validation error: `default-prompt-name` is set to `{name}` but {why}")
        prompt = prompts[name] if name is not None else self.script.default_prompt
        if prompt and isinstance(item, tuple):
            raise self._invalid("Input validation error: `prompt_name` cannot be set with dual inputs")
        return prompt + item if prompt and isinstance(item, str) else item

    def _invalid(self, text: str) -> Refusal:
        return Refusal(422 if self.script.new else 413, "Validation", text)

    def _respond(self, call: Call, items: list[Any]) -> web.Response:
        script = self.script
        if script.misbehaves == "html":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        rows = self._rows(call, items)
        if script.misbehaves == "short":
            rows = rows[1:]
        if script.misbehaves == "empty":
            rows = []
        tokens = sum(len(ids) for _, ids in items)
        headers = {"x-compute-type": "gpu+optimized", "x-compute-tokens": str(tokens)}
        return _answer(rows, headers=headers)

    def _rows(self, call: Call, items: list[Any]) -> list[Any]:
        script, options = self.script, call.options
        rows: list[Any] = []
        for item, ids in items:
            if call.path == "/embed":
                row = draw(ids, script.dimension, script.seed)
                dimensions = options.get("dimensions") if script.new else None
                if dimensions is not None and dimensions > script.dimension:
                    text = "`dimensions` should be smaller than the maximum embedding dimension."
                    raise self._invalid(f"Input validation error: {text}")
                row = row[:dimensions]
                if options.get("normalize", True):
                    row = row * np.float32(1.0 / np.sqrt(np.sum(row.astype(np.float64) ** 2)))
                rows.append(row * np.float32("nan") if "nan-item" in _words(item) else row)
            elif call.path == "/embed_all":
                rows.append([draw([one, at], script.dimension, script.seed) for at, one in enumerate(ids)])
            elif call.path == "/embed_sparse":
                weights: dict[int, float] = {}
                for one in sorted(ids):
                    weights[one] = weights.get(one, 0.0) + 1.0
                rows.append([{"index": index, "value": value} for index, value in weights.items()])
            else:
                if "nan-item" in _words(item):
                    raise Refusal(424, "Backend", "score is NaN")
                rows.append(self._predict(ids, bool(options.get("raw_scores"))))
        if call.path != "/rerank":
            return rows
        ranks = [{"index": at, "score": row[0]["score"]} for at, row in enumerate(rows)]
        return sorted(ranks, key=lambda rank: (rank["score"], rank["index"]), reverse=True)

    def _predict(self, ids: list[int], raw: bool) -> list[dict[str, Any]]:
        names = self.script.label_names
        scores: Array = draw(ids, len(names), self.script.seed)
        if not raw:
            powers = np.exp(scores)
            scores = powers / powers.sum() if len(names) > 1 else 1 / (1 + np.exp(-scores))
        if self.script.misbehaves == "labels":
            names = tuple(f"other-{name}" for name in names)
        classes = [{"score": score, "label": name} for score, name in zip(scores, names, strict=True)]
        return sorted(classes, key=lambda each: float(each["score"]), reverse=True)

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = await self._body(request)
            inputs = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
            self.calls.append(Call("/tokenize", inputs, body))
            if not inputs:
                raise Refusal(400, "Empty", "`inputs` cannot be empty")
            self._check_size(len(inputs))
            if "" in inputs:
                raise Refusal(400, "Empty", "Input validation error: `inputs` cannot be empty")
            prompted = [self._add_prompt(text, body.get("prompt_name")) for text in inputs]
            return _answer([tokenize_words(text, body.get("add_special_tokens", True)) for text in prompted])
        except Refusal as refusal:
            return _error_response(refusal)

    async def _decode(self, request: web.Request) -> web.Response:
        try:
            body = await self._body(request)
            ids = body["ids"] if body["ids"] and isinstance(body["ids"][0], list) else [body["ids"]]
            self._check_size(len(ids))
            if not all(ids):
                raise Refusal(400, "Empty", "Input validation error: `input_ids` cannot be empty")
            skip = {CLS, SEP} if body.get("skip_special_tokens", True) else set()
            known = [[one for one in some if one < VOCABULARY and one not in skip] for some in ids]
            return _answer([" ".join(f"w{one}" for one in some) for some in known])
        except Refusal as refusal:
            return _error_response(refusal)


def _inputs(path: str, body: dict[str, Any]) -> list[Any]:
    """Return the inputs of a call: texts, lists of ids, or pairs. Raises Refusal as the JSON layer does."""
    try:
        if path == "/rerank":
            if not body["texts"]:
                raise Refusal(400, "Empty", "`texts` cannot be empty")
            return [(body["query"], text) for text in body["texts"]]
        inputs = body["inputs"]
    except KeyError as missing:
        raise Refusal(
            422, "", f"Failed to deserialize the JSON body into the target type: missing field `{missing.args[0]}`"
        ) from None
    if path == "/predict":
        return _predicted_inputs(inputs)
    if isinstance(inputs, str) or not inputs or all(type(one) is int for one in inputs):
        return [inputs]
    if isinstance(inputs, list) and all(_is_text(one) for one in inputs):
        return inputs
    raise Refusal(
        422, "", "Failed to deserialize the JSON body: inputs: data did not match any variant of untagged enum"
    )


def _predicted_inputs(inputs: Any) -> list[Any]:
    """Parse predict inputs: a list of two texts is one pair; a list of lists is a batch."""
    if isinstance(inputs, str):
        return [inputs]
    rows = inputs if inputs and isinstance(inputs[0], list) else [inputs]
    for row in rows:
        if not isinstance(row, list) or len(row) not in (1, 2) or not all(isinstance(one, str) for one in row):
            raise Refusal(422, "", "Failed to deserialize the JSON body: inputs: invalid length, expected a string")
    return [row[0] if len(row) == 1 else tuple(row) for row in rows]


def _is_text(one: Any) -> bool:
    return isinstance(one, str) or (isinstance(one, list) and all(type(each) is int for each in one))


def _words(item: Any) -> list[str]:
    if isinstance(item, tuple):
        return [word for text in item for word in text.split()]
    return item.split() if isinstance(item, str) else []


def tokenize_words(text: str, special: bool) -> list[dict[str, Any]]:
    """Return the words with their offsets in bytes."""
    tokens, at = [], 0
    for word in text.split():
        start = len(text[: text.index(word, at)].encode())
        at = text.index(word, at) + len(word)
        tokens.append(
            {"id": word_id(word), "text": word, "special": False, "start": start, "stop": start + len(word.encode())}
        )
    frame = [
        {"id": i, "text": t, "special": True, "start": None, "stop": None} for i, t in ((CLS, "[CLS]"), (SEP, "[SEP]"))
    ]
    return [frame[0], *tokens, frame[1]] if special else tokens


def _answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)


def _error_response(refusal: Refusal) -> web.Response:
    if not refusal.kind:
        return web.Response(text=refusal.text, status=refusal.status)
    return _answer({"error": refusal.text, "error_type": refusal.kind}, refusal.status)


async def serve(server: FakeTei, port: int) -> None:
    """Run forever, in its own process; print the port."""
    server.alone = True
    await server.start(port)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def arguments(description: str | None, *ports: str) -> tuple[Script, list[int]]:
    """Return the script and the ports from the flags of the process."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for port in ports:
        parser.add_argument(f"--{port}", type=int, default=0)
    for one in fields(Script):
        flag, kind = "--" + one.name.replace("_", "-"), type(one.default)
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=kind, default=one.default)
    options = vars(parser.parse_args())
    numbers = [options.pop(port.replace("-", "_")) for port in ports]
    return Script(**options), numbers


def main() -> None:
    script, (port,) = arguments(__doc__, "port")
    asyncio.run(serve(FakeTei(script), port))


if __name__ == "__main__":
    main()
