"""The OpenAPI document: generated, valid, and consistent with the operations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
import pytest
from openapi_spec_validator import validate

from shoal.core.protocols import Operation, Surface
from shoal.errors import ModelNotFound, ModelNotReady, RouteNotFound, ShoalError
from shoal.http.openapi import OpenApi, build_document, operation_id, to_openapi_path
from shoal.http.operation import DocumentedOperation
from shoal.http.request import Reply, Request
from shoal.surfaces import SURFACES, Options


class Pet(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(examples=["Wanda"])]
    age: Annotated[int, msgspec.Meta(ge=0, description="In years.")] = 0


class Problem(msgspec.Struct):
    error: str


async def endpoint(request: Request) -> Reply:
    return Reply()


def operation(**changes: Any) -> Operation:
    return Operation(**{"method": "POST", "path": "/pets", "endpoint": endpoint, "summary": "Add a pet", **changes})


ADD = operation(
    request=Pet,
    response=list[Pet],
    errors={400: Problem, 429: Problem, 499: str},
    example={"name": "Wanda", "model": "any"},
    headers={"x-shoal-batch-size": "Items."},
)


class Pets:
    name = "pets"
    error = Problem

    def __init__(self, *operations: Operation) -> None:
        self._operations = operations

    def routes(self, gateway: Any) -> Sequence[Operation]:
        return self._operations

    def render_error(self, error: Exception) -> tuple[int, dict[str, str], bytes]:
        return 500, {}, b""


class Gateway:
    def __init__(self, default: str, talker: str = "") -> None:
        self.default = default
        self.talker = talker
        self.missing: type[ShoalError] = ModelNotFound

    def resolve(self, name: str, task: str) -> tuple[str, str]:
        model = self.talker if task == "generate" else self.default
        if not model:
            raise self.missing("no model")
        return model, ""


def request(path: str = "/openapi.json") -> Request:
    return Request({"method": "GET", "path": path, "headers": []}, 0.0)


def pet_operation(model: str = "") -> dict[str, Any]:
    post: dict[str, Any] = build_document({"pets": [ADD]}, model)["paths"]["/pets"]["post"]
    return post


def test_all_surfaces_make_a_valid_document() -> None:
    """The document is OpenAPI 3.1 by the specification's own schema, and has every route of every surface."""
    surfaces = [make(Options(metrics=lambda _: b"")) for make in SURFACES if make is not cast(Any, OpenApi)]
    table = {surface.name: surface.routes(cast(Any, None)) for surface in surfaces}
    document = build_document(table)
    validate(document)
    served = {(to_openapi_path(each.path), each.method.lower()) for operations in table.values() for each in operations}
    assert {(path, method) for path, item in document["paths"].items() for method in item} == served


def test_operation_ids_are_unique_and_stable() -> None:
    """An id consists of method and path: generated clients keep their names when code moves."""
    assert operation_id(operation(path="/v1/models/{id:path}", method="GET")) == "get_v1_models_id"
    assert operation_id(operation(path="/")) == "post_root"
    surfaces = [make(Options(metrics=lambda _: b"")) for make in SURFACES if make is not cast(Any, OpenApi)]
    ids = [operation_id(each) for surface in surfaces for each in surface.routes(cast(Any, None))]
    assert len(ids) == len(set(ids))


def test_structs_are_shared_components() -> None:
    """A struct is described once, with its bounds and texts, and referenced elsewhere."""
    document = build_document({"pets": [ADD, operation(path="/pets/{name:path}", method="GET", response=Pet)]})
    schemas = document["components"]["schemas"]
    assert set(schemas) == {"Pet", "Problem"}
    assert schemas["Pet"]["properties"]["age"] == {
        "type": "integer",
        "minimum": 0,
        "description": "In years.",
        "default": 0,
    }
    example_for = document["paths"]["/pets/{name}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert example_for == {"$ref": "#/components/schemas/Pet"}


def test_responses_name_each_status_with_its_body_and_headers() -> None:
    """Success and every error carry their type, their media type and their headers."""
    responses = pet_operation()["responses"]
    assert list(responses) == ["200", "400", "429", "499"]
    assert set(responses["200"]["headers"]) == {"x-request-id", "x-shoal-batch-size"}
    assert set(responses["429"]["headers"]) == {"x-request-id", "retry-after"}
    assert responses["400"]["description"] == "Bad Request"
    assert responses["400"]["content"] == {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert responses["499"]["content"] == {"text/plain": {"schema": {"type": "string"}}}


def test_a_status_with_several_bodies() -> None:
    """For two dialects on one path, every JSON body is listed, and plain text too."""
    kinds: dict[int, Any] = {400: (Problem, Pet, str), 422: (str, Problem)}
    document = build_document({"pets": [operation(request=Pet, errors=kinds)]})
    responses = document["paths"]["/pets"]["post"]["responses"]
    problem, pet = {"$ref": "#/components/schemas/Problem"}, {"$ref": "#/components/schemas/Pet"}
    assert responses["400"]["content"] == {
        "application/json": {"schema": {"anyOf": [problem, pet]}},
        "text/plain": {"schema": {"type": "string"}},
    }
    assert responses["422"]["content"]["application/json"] == {"schema": problem}
    validate(document)


def test_headers_with_one_text_are_written_once() -> None:
    """Equal headers are shared; one with another description under the same name stays in place."""
    other = operation(path="/other", headers={"x-shoal-batch-size": "Something else."})
    document = build_document({"pets": [ADD, other]})
    assert document["components"]["headers"]["x-shoal-batch-size"]["description"] == "Items."
    first, second = (document["paths"][path]["post"]["responses"]["200"]["headers"] for path in ("/pets", "/other"))
    assert first["x-shoal-batch-size"] == {"$ref": "#/components/headers/x-shoal-batch-size"}
    assert second["x-shoal-batch-size"]["description"] == "Something else."
    validate(document)


def test_request_headers_are_documented_where_they_apply() -> None:
    """Operations with a body take an id and a timeout; batched ones also take a class; a plain GET takes none."""
    document = build_document(
        {"pets": [ADD, operation(path="/count", method="GET", response=int), operation(path="/x")]}
    )
    names = [each["$ref"].rpartition("/")[2] for each in document["paths"]["/pets"]["post"]["parameters"]]
    assert names == ["x-request-id", "x-request-timeout", "x-shoal-class"]
    assert "parameters" not in document["paths"]["/count"]["get"]
    assert "parameters" not in document["paths"]["/x"]["post"]


DESCRIBED = DocumentedOperation(
    method="POST",
    path="/feed/{name:path}/now",
    endpoint=endpoint,
    summary="Feed a pet",
    request=Pet,
    response=(Pet, Problem),
    accepted=list[Pet],
    other_responses=(("text/plain", str),),
    optional=True,
    query={"wait": "Or not.", "what": "Of it."},
    required_query=frozenset({"what"}),
    access="admin",
    example={"model": "any", "name": "x"},
)


def test_additional_operation_descriptions() -> None:
    """Query parameters, an optional body, several responses, and 202."""
    document = build_document({"pets": [DESCRIBED]}, "org/name")
    validate(document)
    post = document["paths"]["/feed/{name}/now"]["post"]
    assert [(each["name"], each["in"], each["required"]) for each in post["parameters"][:3]] == [
        ("name", "path", True),
        ("wait", "query", False),
        ("what", "query", True),
    ]
    assert post["requestBody"]["required"] is False
    pet, problem = ({"$ref": f"#/components/schemas/{name}"} for name in ("Pet", "Problem"))
    success = post["responses"]["200"]["content"]
    assert success == {
        "application/json": {"schema": {"anyOf": [pet, problem]}},
        "text/plain": {"schema": {"type": "string"}},
    }
    accepted = post["responses"]["202"]
    assert accepted["content"] == {"application/json": {"schema": {"type": "array", "items": pet}}}
    assert set(accepted["headers"]) == {"x-request-id", "location"}


def test_examples_of_model_management_stay() -> None:
    """Executing the example deletion must not remove the served model."""
    post = build_document({"pets": [DESCRIBED]}, "org/name")["paths"]["/feed/{name}/now"]["post"]
    assert post["requestBody"]["content"]["application/json"]["example"] == {"model": "any", "name": "x"}
    infer = operation(request=Pet, example={"model_name": "any"})
    post = build_document({"pets": [infer]}, "org/name")["paths"]["/pets"]["post"]
    assert post["requestBody"]["content"]["application/json"]["example"] == {"model_name": "org/name"}


def test_security_follows_access() -> None:
    """Public operations need nothing, others the scheme of their plane; only used schemes are listed."""
    document = build_document({"pets": [operation(access="public"), operation(path="/load", access="admin")]})
    assert document["paths"]["/pets"]["post"]["security"] == []
    assert document["paths"]["/load"]["post"]["security"] == [{"admin_key": []}]
    assert set(document["components"]["securitySchemes"]) == {"admin_key"}


def test_examples_name_the_served_model() -> None:
    """An example can be sent unchanged, whatever model the server has."""

    def example_for(model: str) -> Any:
        return pet_operation(model)["requestBody"]["content"]["application/json"]["example"]

    assert example_for("org/name") == {"name": "Wanda", "model": "org/name"}
    assert example_for("") == ADD.example
    table = {"pets": [ADD, operation(path="/talk", generates=True, request=Pet, example=ADD.example)]}
    paths = build_document(table, "org/name", "org/talker")["paths"]
    example = paths["/talk"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert example == {"name": "Wanda", "model": "org/talker"}


def test_an_operation_claimed_twice_is_refused() -> None:
    """The document cannot describe two operations on one path and method."""
    with pytest.raises(ValueError, match=r"POST /pets is defined twice, once by more"):
        build_document({"pets": [operation()], "more": [operation()]})


async def test_the_route_serves_the_document_with_itself_in_it() -> None:
    """GET /openapi.json is public, is JSON, and lists itself after the other surfaces."""
    surface: Surface = OpenApi([Pets(ADD)])
    route, *others = surface.routes(cast(Any, Gateway("org/name")))
    assert route.access == "public"
    reply = await route.endpoint(request())
    assert (b"content-type", b"application/json") in reply.headers
    document = json.loads(reply.body)
    validate(document)
    assert [tag["name"] for tag in document["tags"]] == ["pets", "openapi"]
    assert document["servers"][0]["url"] == "./"
    assert [other.path for other in others] == ["/api-doc/openapi.json", "/explorer/swagger.json"]
    for other in others:
        elsewhere = json.loads((await other.endpoint(request(other.path))).body)
        assert elsewhere["servers"][0]["url"] == "../"


async def test_the_document_is_kept_until_the_default_model_changes() -> None:
    """It is generated once, and again if the default model changes."""
    gateway = Gateway("one")
    route, *_ = OpenApi([Pets(ADD)]).routes(cast(Any, gateway))
    first = (await route.endpoint(request())).body
    assert (await route.endpoint(request())).body is first
    gateway.default = "two"
    assert b'"model":"two"' in (await route.endpoint(request())).body
    gateway.default = ""
    document = (await route.endpoint(request())).body
    assert b'"model":"any"' in document
    gateway.missing = ModelNotReady
    assert (await route.endpoint(request())).body is document
    gateway.talker = "three"
    assert (await route.endpoint(request())).body is not document


def test_errors_are_json() -> None:
    """An error on the document's path is JSON with the status of its kind."""
    status, headers, body = OpenApi([]).render_error(RouteNotFound("no such path"))
    assert (status, headers["content-type"], json.loads(body)) == (404, "application/json", {"error": "no such path"})
