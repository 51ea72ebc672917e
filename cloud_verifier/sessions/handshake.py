"""The answer to a hello, and other conversions from wire messages. Pure."""

from __future__ import annotations

from msgspec import structs

from cloud_verifier.engine.work import ModelFacts
from moa import __version__
from moa.errors import ConfigError
from moa.sampling import SamplingSettings
from moa.wire.codec import wire_limits
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits
from moa.wire.messages import Hello, Sampling, Welcome
from moa.wire.versions import agree_features, agree_version


def answer_hello(hello: Hello, facts: ModelFacts, limits: Limits, *, max_context: int, instance: str) -> Welcome:
    """The welcome for a hello, or a `Refusal` if version, tokenizer or target do not match."""
    version = agree_version(hello.versions)
    if version is None:
        raise Refusal(Code.VERSION, "no protocol version in common")
    if hello.tokenizer and facts.tokenizer and hello.tokenizer != facts.tokenizer:
        raise Refusal(Code.TOKENIZER, "the target here has another tokenizer than this client's drafter")
    if hello.target and facts.target and hello.target != facts.target:
        raise Refusal(Code.TARGET, "another target is served here")
    wanted, notices = "records" in hello.features, []
    fitting = not (hello.drafter and facts.drafter) or hello.drafter == facts.drafter
    records = facts.records if wanted and fitting else None
    if wanted and facts.records is None:
        notices.append("no_records: this verifier has no drafter to make activation records with")
    elif wanted and not fitting:
        notices.append("drafter_mismatch: tokens are verified, but activation records would not fit this drafter")
    lacking = {"records": records is None, "tree": not facts.trees, "grammar": not facts.grammars}
    features = agree_features(hello.features, without=[name for name, lacks in lacking.items() if lacks])
    return Welcome(
        version=version,
        features=features,
        server=f"cloud-verifier/{__version__}",
        instance=instance,
        tokenizer=facts.tokenizer,
        target=facts.target,
        drafter=facts.drafter,
        vocab_size=facts.vocab_size,
        eos_ids=list(facts.eos_ids),
        limits=wire_limits(limits, max_context_tokens=max_context),
        records=records,
        notices=notices,
    )


def sampling_settings(wire: Sampling) -> SamplingSettings:
    """The wire's sampling settings as `SamplingSettings`."""
    try:
        return SamplingSettings(**structs.asdict(wire))
    except ConfigError as error:
        raise Refusal(Code.BAD_MESSAGE, str(error)) from None
