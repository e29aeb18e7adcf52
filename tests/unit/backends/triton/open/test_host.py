"""The Triton that models are loaded into: through its repository's folder, by push, and a server that Shoal starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.backends import parse_address
from shoal.backends.triton.control import Control
from shoal.backends.triton.open.connections import TritonConnections
from shoal.backends.triton.open.host import TritonHost, build_entry_spec
from shoal.config.settings import ModelTable, Settings
from shoal.errors import ConfigError, Forbidden, ModelFailed, TransportFailed
from shoal.models.store import StoredModel
from shoal.specs import ScoreSpec
from tests.fakes.triton import FakeTriton, Refused
from tests.unit.backends.triton.open.kit import LACKING, reads, requests_of, text_model, token_model

NAME = "org/mini"
FOLDER = "org~mini"


def foreign(folder: Path, name: str = "theirs") -> None:
    (folder / name).mkdir()
    (folder / name / "config.pbtxt").write_text('name: "theirs"')


class TestPublishing:
    async def test_an_entry_is_written_and_loaded(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings, folder: Path
    ) -> None:
        await host.publish(NAME, stored, writing)
        assert triton.models[FOLDER].state == "READY"
        assert (folder / FOLDER / "1" / "model.onnx").read_bytes() == b"graph"
        entry = await host.find_entry(NAME)
        assert entry is not None
        assert (entry.managed, entry.source) == (True, "hf:org/mini")

    async def test_what_cannot_be_loaded_is_not_left(
        self, writing: Settings, tritons: TritonConnections, triton: FakeTriton, stored: StoredModel, folder: Path
    ) -> None:
        """A new entry is removed; the error has the server's own reason."""
        reads(triton, folder, load_error="the graph is broken")
        host = TritonHost(writing, tritons)
        with pytest.raises(ModelFailed, match="the graph is broken"):
            await host.publish(NAME, stored, writing)
        assert await host.find_entry(NAME) is None

    async def test_an_entry_that_was_there_stays(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        """Another Shoal may have it loaded."""
        await host.publish(NAME, stored, writing)
        triton.models[FOLDER].load_error = "out of memory"
        with pytest.raises(ModelFailed, match="out of memory"):
            await host.publish(NAME, stored, writing)
        assert await host.find_entry(NAME) is not None

    async def test_what_was_published_in_vain_is_taken_back(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        """From the server and from the repository; a second call does nothing."""
        await host.publish(NAME, stored, writing)
        await host.undo_publish(NAME, writing)
        assert triton.models[FOLDER].state == "UNAVAILABLE"
        assert await host.find_entry(NAME) is None
        await host.undo_publish(NAME, writing)

    async def test_what_others_made_is_not_taken_back(
        self, host: TritonHost, triton: FakeTriton, writing: Settings, folder: Path
    ) -> None:
        foreign(folder)
        triton.add(text_model("theirs"))
        await host.undo_publish("theirs", writing)
        assert triton.models["theirs"].state == "READY"
        assert (folder / "theirs").is_dir()

    async def test_what_was_pushed_in_vain_is_taken_back(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """Also while the server is unreachable: it has lost the model then."""
        await pushing.publish(NAME, stored, settings)
        await pushing.undo_publish(NAME, settings)
        assert triton.models[FOLDER].state != "READY"
        assert not await pushing.remove(NAME)
        await pushing.write(NAME, stored, settings)
        await triton.stop()
        await pushing.undo_publish(NAME, settings)

    async def test_a_server_without_onnxruntime_gets_python(
        self,
        writing: Settings,
        tritons: TritonConnections,
        triton: FakeTriton,
        stored: StoredModel,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Only a load shows it; the host remembers it for the next model."""
        reads(triton, folder)
        load = triton._load

        def lacking(request: Any) -> Any:
            if "onnxruntime" in (folder / request.model_name / "config.pbtxt").read_text():
                raise Refused(LACKING)
            return load(request)

        monkeypatch.setattr(triton, "_load", lacking)
        host = TritonHost(writing, tritons)
        await host.publish(NAME, stored, writing)
        assert (folder / FOLDER / "1" / "model.py").is_file()
        loads = triton.calls["RepositoryModelLoad"]
        await host.publish("other", stored, writing)
        assert triton.calls["RepositoryModelLoad"] == loads + 1

    @pytest.mark.parametrize("platform", ["auto", "onnxruntime"])
    async def test_a_requested_backend_is_not_replaced(
        self,
        writing: Settings,
        tritons: TritonConnections,
        triton: FakeTriton,
        stored: StoredModel,
        folder: Path,
        platform: Any,
    ) -> None:
        """Python is tried only once, and no new entry remains after any failure."""
        chosen = msgspec.structs.replace(writing, triton_platform=platform)
        reads(triton, folder, load_error=LACKING)
        host = TritonHost(chosen, tritons)
        with pytest.raises(ModelFailed, match="unable to find backend"):
            await host.publish(NAME, stored, chosen)
        assert triton.calls["RepositoryModelLoad"] == (2 if platform == "auto" else 1)
        assert await host.find_entry(NAME) is None

    async def test_what_shoal_did_not_make_is_left_alone(
        self, host: TritonHost, stored: StoredModel, writing: Settings, folder: Path
    ) -> None:
        foreign(folder)
        with pytest.raises(Forbidden, match="not made by Shoal"):
            await host.publish("theirs", stored, writing)

    async def test_without_a_folder_files_are_pushed(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """With the configuration, and again after a restart of the server."""
        assert await pushing.write(NAME, stored, settings) == triton.target
        await pushing.load(NAME, settings)
        sent = requests_of(triton, "RepositoryModelLoad")[0]
        assert {"config", "file:1/model.onnx"} <= set(sent.parameters)
        await triton.stop()
        await triton.start()
        assert FOLDER not in triton.models
        await pushing.load(NAME, settings)
        assert triton.models[FOLDER].state == "READY"

    async def test_what_was_pushed_and_did_not_load_is_forgotten(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        triton.add(token_model(FOLDER, loaded=False, pushed=True, load_error="broken"))
        with pytest.raises(ModelFailed):
            await pushing.publish(NAME, stored, settings)
        assert not await pushing.remove(NAME)

    async def test_an_ensemble_is_pushed_whole(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """The server reports an error for its load although the load succeeds, so readiness decides."""
        load = triton._load

        def refusing(request: Any) -> Any:
            answer = load(request)
            if request.model_name == FOLDER:
                raise Refused("failed to load, failed to poll from model repository")
            return answer

        triton._load = refusing  # type: ignore[method-assign]
        await pushing.publish(NAME, stored, settings, text_in=True)
        assert [each.model_name for each in requests_of(triton, "RepositoryModelLoad")] == [
            f"{FOLDER}~~encoder",
            f"{FOLDER}~~tokenizer",
            FOLDER,
        ]

    async def test_an_ensemble_that_is_not_ready_has_failed(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        triton.add(token_model(FOLDER, loaded=False, pushed=True, load_error="parts do not fit"))
        with pytest.raises(ModelFailed):
            await pushing.publish(NAME, stored, settings, text_in=True)


class TestWhoseItIs:
    async def test_by_the_folder(self, host: TritonHost, stored: StoredModel, writing: Settings, folder: Path) -> None:
        foreign(folder)
        await host.publish(NAME, stored, writing)
        assert [await host.is_foreign(name) for name in ("theirs", NAME, "nobody")] == [True, False, False]
        source = parse_address("hf:org/mini")
        assert await host.has_model(NAME, source)
        assert not await host.has_model(NAME, parse_address("hf:org/other"))
        assert not await host.has_model("theirs", source)
        assert not await host.has_model("nobody", source)

    async def test_by_the_index(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """A model pushed from here is managed; without a repository no other Shoal's model can be used."""
        triton.add(text_model("theirs", loaded=False))
        await pushing.write(NAME, stored, settings)
        assert [await pushing.is_foreign(name) for name in ("theirs", NAME, "nobody")] == [True, False, False]
        assert not await pushing.has_model(NAME, parse_address("hf:org/mini"))


class TestTarget:
    async def test_the_model_by_its_folders_name(self, host: TritonHost, triton: FakeTriton, writing: Settings) -> None:
        target = await host.endpoint(NAME, ModelTable(), writing)
        assert (target.model, target.ensemble) == (FOLDER, FOLDER)
        assert target.address == f"triton://{triton.target}#{FOLDER}"

    async def test_texts_are_tokenised_here_all_the_same(
        self, host: TritonHost, pushing: TritonHost, stored: StoredModel, writing: Settings, settings: Settings
    ) -> None:
        """For a model that takes texts on Triton, Shoal calls the encoder; unloading removes all parts."""
        await host.write(NAME, stored, writing, text_in=True)
        await pushing.write(NAME, stored, settings, text_in=True)
        for each, chosen in ((host, writing), (pushing, settings)):
            target = await each.endpoint(NAME, ModelTable(), chosen)
            assert (target.model, target.ensemble) == (f"{FOLDER}~~encoder", FOLDER)

    async def test_it_loads_by_the_served_name(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        await host.write(NAME, stored, writing)
        target = await host.endpoint(NAME, ModelTable(), writing)
        assert target.load is not None
        await target.load()
        assert triton.models[FOLDER].state == "READY"

    async def test_with_tls(self, settings: Settings, tritons: TritonConnections) -> None:
        host = TritonHost(msgspec.structs.replace(settings, triton_url="tritons://gpu1:9"), tritons)
        assert host.url == "gpu1:9"
        assert (await host.endpoint(NAME, ModelTable(), settings)).address == f"tritons://gpu1:9#{FOLDER}"
        assert (await host.control()).client.target == "gpu1:9"


class TestEntries:
    async def test_of_the_folder(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings, folder: Path
    ) -> None:
        foreign(folder)
        await host.write(NAME, stored, writing)
        found = {entry.name: entry for entry in await host.entries()}
        assert found[NAME].source == "hf:org/mini"
        assert (found[NAME].managed, found["theirs"].managed) == (True, False)
        assert found[NAME].size > 0
        assert found["theirs"].source == f"triton://{triton.target}#theirs"
        assert {entry.backend for entry in found.values()} == {"triton"}

    async def test_a_folder_that_no_name_leads_to(self, host: TritonHost, triton: FakeTriton, folder: Path) -> None:
        """A foreign folder is listed under its own name and does not break the list."""
        foreign(folder, "a+b")
        assert [(entry.name, entry.source) for entry in await host.entries()] == [
            ("a+b", f"triton://{triton.target}#a+b")
        ]

    async def test_of_the_index(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """Parts of an ensemble are not listed."""
        for name in ("b", "a", "a~~encoder", "a~~tokenizer"):
            triton.add(text_model(name))
        await pushing.publish(NAME, stored, settings)
        found = {entry.name: entry.managed for entry in await pushing.entries()}
        assert found == {"a": False, "b": False, NAME: True}

    async def test_a_server_that_is_away_has_none(self, pushing: TritonHost, triton: FakeTriton) -> None:
        await triton.stop()
        assert await pushing.entries() == []

    async def test_nobody_waits_twice_for_a_server_that_is_away(
        self, pushing: TritonHost, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next list refreshes in the background, and the one after that has the server's models again."""
        triton.add(text_model("a"))
        assert [entry.name for entry in await pushing.entries()] == ["a"]
        control, gate = pushing.control, asyncio.Event()

        async def away() -> Control:
            await gate.wait()
            raise TransportFailed("the server is not there")

        monkeypatch.setattr(pushing, "control", away)
        first = asyncio.create_task(pushing.entries())
        await asyncio.sleep(0)
        assert not first.done()
        gate.set()
        assert await first == []
        gate.clear()
        assert await pushing.entries() == await pushing.entries() == []
        monkeypatch.setattr(pushing, "control", control)
        gate.set()
        refresh = pushing._refresh_task
        assert refresh is not None
        await refresh
        await pushing.entries()
        assert pushing._refresh_task is not None
        await pushing._refresh_task
        assert [entry.name for entry in await pushing.entries()] == ["a"]


class TestRemoving:
    async def test_what_shoal_wrote(
        self, host: TritonHost, stored: StoredModel, writing: Settings, folder: Path
    ) -> None:
        foreign(folder)
        await host.write(NAME, stored, writing)
        assert await host.remove(NAME)
        assert not await host.remove(NAME)
        with pytest.raises(Forbidden):
            await host.remove("theirs")

    async def test_what_was_pushed(
        self, pushing: TritonHost, triton: FakeTriton, stored: StoredModel, settings: Settings
    ) -> None:
        """Models in a repository that Shoal cannot write cannot be deleted."""
        triton.add(text_model("theirs"))
        await pushing.write(NAME, stored, settings)
        assert await pushing.remove(NAME)
        assert not await pushing.remove(NAME)
        with pytest.raises(Forbidden, match="set triton_repository to its folder"):
            await pushing.remove("theirs")

    async def test_forgetting_what_was_unloaded(
        self, pushing: TritonHost, stored: StoredModel, settings: Settings
    ) -> None:
        await pushing.write(NAME, stored, settings)
        pushing.forget(NAME)
        assert not await pushing.remove(NAME)

    async def test_unloading(
        self, host: TritonHost, triton: FakeTriton, stored: StoredModel, writing: Settings
    ) -> None:
        """An unreachable server has nothing loaded."""
        await host.publish(NAME, stored, writing)
        await host.unload(NAME, writing)
        assert triton.models[FOLDER].state == "UNAVAILABLE"
        await triton.stop()
        await host.unload(NAME, writing)


class TestEntry:
    def test_what_the_settings_say(self, stored: StoredModel) -> None:
        settings = Settings(
            max_batch_size=16, triton_instances=2, triton_kind="gpu", triton_fp16=True, triton_accelerator="tensorrt"
        )
        spec = build_entry_spec(NAME, stored, settings)
        options = spec.options
        assert (options.platform, options.max_batch_size, options.instances) == ("onnxruntime", 16, 2)
        assert (options.kind, options.fp16, options.accelerator) == ("gpu", True, "tensorrt")
        assert (spec.source, spec.graph, spec.tokenizer) == ("hf:org/mini", stored.graph, stored.tokenizer)
        assert len(spec.space) == 16

    @pytest.mark.parametrize(
        ("wanted", "platforms", "expected"),
        [
            ("auto", (), "onnxruntime"),
            ("auto", ("python", "onnxruntime"), "onnxruntime"),
            ("auto", ("python",), "python"),
            ("openvino", ("python",), "openvino"),
        ],
    )
    def test_the_platform(self, stored: StoredModel, wanted: Any, platforms: tuple[str, ...], expected: str) -> None:
        assert build_entry_spec(NAME, stored, Settings(triton_platform=wanted), platforms).options.platform == expected

    def test_plans_are_not_made_here(self, stored: StoredModel) -> None:
        with pytest.raises(ConfigError, match="trtexec") as caught:
            build_entry_spec(NAME, stored, Settings(triton_platform="tensorrt"))
        assert caught.value.param == "triton_platform"

    def test_an_ensemble_of_texts_is_over_dense_vectors(self, stored: StoredModel) -> None:
        """A client without a tokenizer can use only dense vectors."""
        text = msgspec.structs.replace(
            stored.manifest.text_spec, dimension=0, score=ScoreSpec(labels=("a",), activation="sigmoid")
        )
        other = StoredModel(stored.path, msgspec.structs.replace(stored.manifest, text=text))
        assert build_entry_spec(NAME, other, Settings()).space == ""
        with pytest.raises(ConfigError, match="returns no dense vectors: load it without text_in") as caught:
            build_entry_spec(NAME, other, Settings(triton_text_in=True))
        assert caught.value.param == "triton_text_in"

    def test_options_of_the_load_win(self, stored: StoredModel) -> None:
        settings = Settings(triton_text_in=True)
        assert [
            build_entry_spec(NAME, stored, settings, text_in=each).options.text_in for each in (None, False, True)
        ] == [
            True,
            False,
            True,
        ]

    def test_external_weights_go_along(self, stored: StoredModel) -> None:
        (stored.path / "model.onnx_data").write_bytes(b"x")
        (stored.path / "model.onnx.data").write_bytes(b"x")
        assert {path.name for path in build_entry_spec(NAME, stored, Settings()).data} == {
            "model.onnx_data",
            "model.onnx.data",
        }
