"""How each engine is asked to go on, and how its answer is read.

Each asks for exactly our sampling: what an engine would add by default (llama-server's top-k of 40
and min-p of 0.05) is switched off by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from cloud_verifier.upstream.chats import (
    Anthropic,
    Chat,
    ChatPrefix,
    ChatVllm,
    ChatWhole,
    other_sampling,
)
from cloud_verifier.upstream.contract import (
    Candidates,
    Continuation,
    Dialect,
    Ending,
    Piece,
    Reading,
    UpstreamError,
)
from cloud_verifier.upstream.lines import (
    choices,
    ending,
    events,
    first_choice,
    listed,
    objects,
    openai_usage,
    text_of,
    token_ids,
    usage_of,
)
from cloud_verifier.upstream.scoring import place_of
from moa.errors import UsageError


class LlamaServer(Dialect):
    """llama.cpp's server: `POST /completion` with token ids; it keeps the prompt's KV cache."""

    name = "llama-server"
    takes: Literal["tokens", "text", "chat"] = "tokens"
    most_candidates = 20

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../completion"

    def tokenize_body(self, text: str, model: str) -> dict[str, object]:
        """Its own names."""
        return {"content": text, "add_special": False, "parse_special": False}

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request with llama-server's names; what it would add to the
        sampling by default is switched off."""
        sampling = asked.sampling
        body: dict[str, object] = {
            "model": model,
            "prompt": list(asked.ids),
            "n_predict": asked.most,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            "return_progress": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            # By default the penalty looks at the last 64 tokens; ours looks at all.
            "repeat_last_n": len(asked.ids) + asked.most,
            "seed": sampling.seed % 2**32,
            "n_probs": asked.candidates,
        }
        if asked.schema is not None:
            body["json_schema"] = asked.schema
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer: each event has `tokens`, and the last one says why it
        stopped. Before them events may say how far the prompt is read."""
        endings: dict[Any, Ending] = {"eos": "eos", "limit": "length"}
        async for event in events(lines):
            if event.get("prompt_progress") is not None:
                # It has a token, too, which is none: 0.
                yield Piece(reading=_reading(event["prompt_progress"]))
                continue
            ids = token_ids(event.get("tokens"))
            places = tuple(map(self._place, listed(event.get("completion_probabilities"))))
            if event.get("stop"):
                yield Piece(
                    ids=ids,
                    # This event may tell the places of the whole answer: its own are the last.
                    candidates=places[len(places) - len(ids) :],
                    ending=endings.get(event.get("stop_type"), "cut"),
                    usage=usage_of(event, "tokens_evaluated", "tokens_predicted"),
                )
                return
            yield Piece(ids=ids, candidates=places)

    def _place(self, entry: Any) -> Candidates:
        """Returns the candidates for one token of the answer, from its entry in
        `completion_probabilities`: the likeliest tokens in its place, with the model's
        log-probabilities before any sampling, and the log-probability of the token itself."""
        if not isinstance(entry, dict):
            raise UpstreamError("the upstream sent candidates that are none")
        likeliest = []
        for one in listed(entry.get("top_logprobs")):
            if isinstance(one, dict):
                likeliest.append((one.get("logprob"), one.get("id")))
        return place_of(likeliest, most=self.most_candidates, own=entry.get("logprob"))


class Vllm(Dialect):
    """vLLM's `POST /v1/completions` with token ids, which it also returns (0.11 and later)."""

    name = "vllm"
    takes: Literal["tokens", "text", "chat"] = "tokens"
    scores = True
    most_candidates = 20
    """vLLM's own limit, unless it was started with another `--max-logprobs`."""
    optional: ClassVar[Mapping[str, str]] = {"stream_options": ""}

    def path(self) -> str:
        """OpenAI's route."""
        return "completions"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request with OpenAI's names and vLLM's own fields."""
        sampling = asked.sampling
        body = _openai_body(asked, model, prompt=list(asked.ids))
        if asked.schema is not None:
            body["structured_outputs"] = {"json": asked.schema}
        if asked.candidates:
            body["logprobs"] = asked.candidates
            body["return_tokens_as_token_ids"] = True
        body["top_k"] = sampling.top_k or -1  # -1 is off
        body["min_p"] = sampling.min_p
        body["repetition_penalty"] = sampling.repetition_penalty
        body["return_token_ids"] = True
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer, each with its `token_ids`."""
        async for choice in choices(lines):
            if "token_ids" not in choice and choice.get("text"):
                raise UpstreamError(
                    "the upstream tells no token ids",
                    later=False,
                    hint="use vLLM 0.11 or later, or --upstream-api completions",
                )
            yield Piece(
                ids=token_ids(choice.get("token_ids")),
                candidates=self._written(choice.get("logprobs")),
                ending=ending(choice),
                usage=openai_usage(choice),
            )

    def score_body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request to score a draft: the draft is the end of the prompt, whose
        log-probabilities are asked for. vLLM then leaves its prefix cache out, and runs the whole
        prompt."""
        return {
            "model": model,
            "prompt": [*asked.ids, *asked.draft],
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
            "prompt_logprobs": asked.candidates,
            "logprobs": asked.candidates,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }

    def scored(self, answer: Any, asked: Continuation) -> tuple[Candidates, ...]:
        """Returns the candidates for each place of the draft, and for the place behind it. In
        `prompt_logprobs` each token of the prompt but the first has an object of candidates by id,
        and of the token itself, which may be less likely than they."""
        choice = first_choice(answer)
        prompt = listed(choice.get("prompt_logprobs"))[len(asked.ids) :]  # the draft's part of it
        written = self._written(choice.get("logprobs"))
        if len(prompt) != len(asked.draft) or not written:
            raise UpstreamError("the upstream tells candidates for other tokens than asked for")
        places = []
        for told in prompt:
            if not isinstance(told, dict):
                raise UpstreamError("the upstream sent candidates that are none")
            likeliest = [
                (one.get("logprob"), token) for token, one in told.items() if isinstance(one, dict)
            ]
            places.append(place_of(likeliest, most=asked.candidates))
        return (*places, written[0])

    def _written(self, told: Any) -> tuple[Candidates, ...]:
        """Returns the candidates for each token that vLLM wrote, from OpenAI's log-probabilities
        with tokens written as `token_id:17`."""
        if not isinstance(told, dict):
            return ()
        places = []
        owns = listed(told.get("token_logprobs"))
        for own, likeliest in zip(owns, listed(told.get("top_logprobs")), strict=False):
            if not isinstance(likeliest, dict):
                raise UpstreamError("the upstream sent candidates that are none")
            pairs = [
                (number, str(token).removeprefix("token_id:"))
                for token, number in likeliest.items()
            ]
            places.append(place_of(pairs, most=self.most_candidates, own=own))
        return tuple(places)


class Sglang(Dialect):
    """SGLang's `POST /generate` with `input_ids`. Held to exchanges that others have published: it
    has not met a running server."""

    name = "sglang"
    takes: Literal["tokens", "text", "chat"] = "tokens"
    scores = True
    most_candidates = 64
    """SGLang has no limit of its own; more than this make long answers."""

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../generate"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request with SGLang's own names."""
        sampling = asked.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": asked.most,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,  # -1 is off
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "sampling_seed": sampling.seed,
            "skip_special_tokens": False,
        }
        if asked.schema is not None:
            parameters["json_schema"] = msgspec.json.encode(asked.schema).decode()
        body: dict[str, object] = {
            "input_ids": list(asked.ids),
            "stream": True,
            "sampling_params": parameters,
        }
        if asked.candidates:
            body |= self._asks_candidates(asked.candidates)
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer. An event's `output_ids` are all tokens so far, or, if the
        server runs with --incremental-streaming-output, the new ones."""
        endings: dict[Any, Ending] = {None: "", "stop": "eos", "length": "length"}
        known: tuple[int, ...] = ()
        async for event in events(lines):
            new = token_ids(event.get("output_ids"))
            if known and new[: len(known)] == known:
                new = new[len(known) :]
            known += new
            meta = event.get("meta_info")
            candidates: tuple[Candidates, ...] = ()
            if isinstance(meta, dict):
                candidates = self._written(meta, len(new))
            yield Piece(
                ids=new,
                candidates=candidates,
                ending=endings.get(_sglang_reason(meta), "cut"),
                usage=usage_of(meta, "prompt_tokens", "completion_tokens"),
            )

    def score_body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request to score a draft: the draft is the end of the input, and
        its log-probabilities are asked for. SGLang takes what comes before from its prefix
        cache."""
        return self._asks_candidates(asked.candidates) | {
            "input_ids": [*asked.ids, *asked.draft],
            "stream": False,
            # The first entry is always empty. So it begins at the token before the draft.
            "logprob_start_len": len(asked.ids) - 1,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }

    def scored(self, answer: Any, asked: Continuation) -> tuple[Candidates, ...]:
        """Returns the candidates for each place of the draft, and for the place behind it: one list
        of `input_top_logprobs` for each token from `logprob_start_len` on."""
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(meta, dict):
            raise UpstreamError("the upstream tells no candidates")
        given = listed(meta.get("input_top_logprobs"))[1:]  # the first entry is always empty
        written = self._written(meta, 1)
        if len(given) != len(asked.draft) or not written:
            raise UpstreamError("the upstream tells candidates for other tokens than asked for")
        return (*(self._place(told) for told in given), written[0])

    @staticmethod
    def _asks_candidates(count: int) -> dict[str, object]:
        return {"return_logprob": True, "top_logprobs_num": count, "return_text_in_logprobs": False}

    def _written(self, meta: dict[str, Any], count: int) -> tuple[Candidates, ...]:
        """Returns the candidates for the `count` latest tokens. Events tell those of all tokens so
        far, or of new ones."""
        likeliest = listed(meta.get("output_top_logprobs"))
        owns = listed(meta.get("output_token_logprobs"))
        if not likeliest or not count:
            return ()
        latest = zip(likeliest[-count:], owns[-count:], strict=False)
        return tuple(self._place(told, listed(own)[:1]) for told, own in latest)

    def _place(self, told: Any, own: Sequence[Any] = ()) -> Candidates:
        """A list of triples: log-probability, token, and its text."""
        pairs = [listed(one)[:2] for one in listed(told)]
        return place_of(pairs, most=self.most_candidates, own=own[0] if own else 0.0)


class Completions(Dialect):
    """Any `POST /v1/completions` that takes a text as it is, without a chat template: vLLM, SGLang,
    llama-server, our own endpoints and many others."""

    name = "completions"
    takes: Literal["tokens", "text", "chat"] = "text"
    optional: ClassVar[Mapping[str, str]] = {"stream_options": ""}

    def path(self) -> str:
        """OpenAI's route."""
        return "completions"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request with OpenAI's names; fields that some services refuse are
        there only where they are set."""
        body = _openai_body(asked, model, prompt=asked.text)
        return body | other_sampling(asked)

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Read the answer's chunks, each with its `text`."""
        async for choice in choices(lines):
            yield Piece(
                text=text_of(choice.get("text")),
                ending=ending(choice),
                usage=openai_usage(choice),
            )


class Ollama(Dialect):
    """Ollama's `POST /api/generate` in raw mode: no template is applied."""

    name = "ollama"
    takes: Literal["tokens", "text", "chat"] = "text"

    def path(self) -> str:
        """Beside `/v1`, not below it."""
        return "../api/generate"

    def body(self, asked: Continuation, model: str) -> dict[str, object]:
        """Returns the JSON of a request with Ollama's own names."""
        sampling = asked.sampling
        body: dict[str, object] = {
            "model": model,
            "prompt": asked.text,
            "raw": True,
            "stream": True,
            "options": {
                "num_predict": asked.most,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "seed": sampling.seed % 2**32,
            },
        }
        if asked.schema is not None:
            body["format"] = asked.schema
        return body

    async def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[Piece]:
        """Yield the pieces of the answer, one object a line. The last one is `done`, and says why
        it stopped."""
        endings: dict[Any, Ending] = {"stop": "eos", "length": "length"}
        async for event in objects(lines):
            text = text_of(event.get("response"))
            if event.get("done"):
                yield Piece(
                    text=text,
                    ending=endings.get(event.get("done_reason"), "cut"),
                    usage=usage_of(event, "prompt_eval_count", "eval_count"),
                )
                return
            yield Piece(text=text)


DIALECTS: dict[str, type[Dialect]] = {
    kind.name: kind
    for kind in (
        LlamaServer,
        Vllm,
        Sglang,
        Completions,
        Ollama,
        Chat,
        ChatVllm,
        ChatPrefix,
        ChatWhole,
        Anthropic,
    )
}
_OWNERS = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang", "library": "ollama"}
"""Who owns the models in an engine's own list."""
_HOSTS = {
    "api.openai.com": "chat-whole",
    "generativelanguage.googleapis.com": "chat-whole",
    "api.anthropic.com": "anthropic",
    "api.mistral.ai": "chat-prefix",
    "api.deepseek.com": "chat-prefix",
    "openrouter.ai": "chat",
}
"""Services that take chats alone."""


_CHATS = {"llama-server": "chat", "vllm": "chat-vllm", "sglang": "chat-vllm"}
"""How engines that take tokens are asked where theirs are not the device's."""


def dialect(name: str, owner: str = "", host: str = "", *, same_tokens: bool = True) -> Dialect:
    """Returns how a kind of engine is asked, by its name. For `auto` it is chosen by the service's
    host name, or by who owns its models; any other service is asked by chats, of which it makes its
    model's own prompt, and which can say what tools and schemas there are. So is one that takes
    tokens without `same_tokens`, where its tokenizer is not the device's."""
    if name == "auto":
        name = _HOSTS.get(host) or _OWNERS.get(owner, "chat")
        if not same_tokens:
            name = _CHATS.get(name, name)
    if name not in DIALECTS:
        raise UsageError(
            f"unknown interface {name!r} of an upstream",
            hint=f"--upstream-api is one of auto, {', '.join(DIALECTS)}; auto finds out what is spoken"
            " there, and OpenAI's chats are chat-whole",
        )
    return DIALECTS[name]()


def _reading(told: Any) -> Reading | None:
    """Returns how far llama-server says it has read the prompt; None if it does not say, or says
    nonsense."""
    if not isinstance(told, dict):
        return None
    done = told.get("processed")
    total = told.get("total")
    if type(done) is not int or type(total) is not int or not 0 <= done <= total < 2**31:
        return None
    return Reading(done, total)


def _sglang_reason(meta: object) -> object:
    """Why an answer of SGLang's has ended, by an event's `meta_info`; None while it goes on. It
    may be an object with a `type`."""
    if not isinstance(meta, dict):
        return None
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        return reason.get("type")
    return reason


def _openai_body(asked: Continuation, model: str, *, prompt: object) -> dict[str, object]:
    """Returns the fields that every service with OpenAI's completions knows; `prompt` is text or
    token ids."""
    sampling = asked.sampling
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": asked.most,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
