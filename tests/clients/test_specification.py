"""Any request that OpenAI's specification allows, and many that it does not: answered or refused in
the right shape."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.clients.conftest import MODEL, PATIENCE, Device
from tests.clients.specification import read

schemathesis = pytest.importorskip("schemathesis", reason="needs `make clients`")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
EXAMPLES = 15
"""For each route. To make a request of a schema that large takes longer than to answer it."""
SCHEMA = schemathesis.openapi.from_dict(read())


@SCHEMA.parametrize()
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_brings_an_error_of_ours_or_a_wrong_shape(device: Device, case: Any) -> None:
    if isinstance(
        case.body, dict
    ):  # a model that is not there would be the end of nearly every request
        case.body |= {"model": MODEL} if isinstance(case.body.get("model"), str) else {}
    if "model" in case.path_parameters:
        case.path_parameters["model"] = MODEL
    response = case.call(base_url=f"{device.address}/v1", timeout=PATIENCE)
    checks = [schemathesis.checks.not_a_server_error]
    openapi = schemathesis.specs.openapi.checks
    if "event-stream" not in response.headers.get("content-type", [""])[0]:
        checks += [openapi.response_schema_conformance, openapi.content_type_conformance]
    case.validate_response(response, checks=checks)
