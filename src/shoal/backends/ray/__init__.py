"""Backend for models that run as deployments of Ray Serve, in the cluster of this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shoal.backends.base.backend import Backend, Resources, Target
from shoal.config.settings import Settings
from shoal.core.lifecycle.loading import Entry, ProgressReporter
from shoal.core.protocols import Runner
from shoal.errors import ConfigError, Forbidden, ShoalError
from shoal.models.address import Address, ServedModel

if TYPE_CHECKING:
    from shoal.backends.ray.cluster import Cluster, DeploymentId
    from shoal.backends.ray.watch import StatusWatch

NO_APPLICATION = "models of files run on Ray only in a front that Ray Serve runs: `serve run shoal.ray:app`"


class RayBackend(Backend):
    """Models of an application of Ray Serve: those that it was deployed with, and those that are loaded into
    applications of their own while it runs."""

    name = "ray"
    remote = True
    offers_every_s = 1.0
    drops_absent = True

    @classmethod
    def explain_no_files(cls, settings: Settings) -> str:
        return "" if settings.ray_application else NO_APPLICATION

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._cluster: Cluster | None = None
        self._watch: StatusWatch | None = None

    async def aclose(self) -> None:
        if self._watch is not None and self._cluster is not None:
            await self._watch.aclose()
            self._cluster.close()

    async def offers(self, address: Address) -> dict[str, ServedModel | str]:
        from shoal.backends.ray.cluster import FRESH_S, find_models

        cluster, _ = self._connect()
        found = find_models(await cluster.states(FRESH_S), address.target)
        return {
            name: ServedModel(name=name, addresses=(Address(scheme="ray", target=address.target, model=name),))
            for name in found
        }

    async def open(self, target: Target, report: ProgressReporter) -> Runner:
        if target.addresses[0].local:
            return await self._open_files(target, report)
        if len(target.addresses) > 1:
            raise ConfigError(f"{target.source}: name one deployment: Ray Serve runs several replicas of it")
        address = target.addresses[0]
        return await self._open(target, address.target, address.model, report)

    async def _open_files(self, target: Target, report: ProgressReporter) -> Runner:
        """Deploy a model in an application of its own, unless it runs already."""
        from shoal.backends.ray.cluster import find_models, is_loaded_later, loaded_application

        cluster, _ = self._connect()
        application = target.settings.ray_application
        states = await cluster.states()
        found = find_models(states, application).get(target.name)
        if found is not None and not (is_loaded_later(found) and states[found].failed):
            runner = await self._open(target, application, target.name, report)
        else:
            report("deploying it")
            own = loaded_application(application, target.name)
            try:
                await cluster.start(self.resources.build_deployment(target), own)
                runner = await self._open(target, application, target.name, report)
            except BaseException:  # a cancelled load as well: nothing else would delete it
                await asyncio.shield(cluster.delete(own))
                raise
        if target.addresses[0].id not in (runner.facts.id, ""):
            await runner.aclose()
            raise ConfigError(f"{target.name} runs in {application} from {runner.facts.source}: unload it first")
        return runner

    async def _open(self, target: Target, application: str, model: str, report: ProgressReporter) -> Runner:
        """Open a model once it is deployed."""
        from shoal.backends.ray.model import RayModel

        cluster, watch = self._connect()
        deployment = await self._wait_for_deployment(application, model, report)
        runner = RayModel(cluster, deployment, model, target.settings.replica_routing, report)
        watch.add(runner)
        try:
            await runner.open()
        except BaseException:  # a cancelled load as well
            await runner.aclose()
            raise
        return runner

    async def _wait_for_deployment(self, application: str, model: str, report: ProgressReporter) -> DeploymentId:
        from shoal.backends.ray.cluster import find_models
        from shoal.backends.ray.watch import LOOK_S

        cluster, _ = self._connect()
        while True:
            try:
                found = find_models(await cluster.states(), application)
                if model in found:
                    return found[model]
                reason = f"it has no deployment {model}"
            except ConfigError:
                raise
            except ShoalError as error:
                reason = error.message
            report(f"waiting for the Ray Serve application {application}: {reason}")
            await asyncio.sleep(LOOK_S)

    def check_unload(self, name: str, runner: Runner) -> None:
        from shoal.backends.ray.cluster import is_loaded_later
        from shoal.backends.ray.model import RayModel

        assert isinstance(runner, RayModel)
        if not is_loaded_later(runner.deployment):
            raise Forbidden(
                f"{name!r} is a deployment of the application {runner.deployment.application}: remove it from the "
                "application's configuration and deploy that again",
                param="model",
            )

    def mark_gone(self, runner: Runner) -> None:
        from shoal.backends.ray.model import RayModel

        assert isinstance(runner, RayModel)
        runner.is_gone = True

    async def unload(self, name: str, runner: Runner) -> None:
        from shoal.backends.ray.cluster import is_loaded_later
        from shoal.backends.ray.model import RayModel

        assert isinstance(runner, RayModel)
        cluster, _ = self._connect()
        if runner.is_gone:  # one of that name is another one
            return
        if is_loaded_later(runner.deployment) and runner.deployment in await cluster.states():
            await cluster.delete(runner.deployment.application)

    async def has_model(self, target: Target) -> bool:
        """Whether its files are no concern of this process: replicas fetch them where they run."""
        return True

    async def entries(self) -> list[Entry]:
        from shoal.backends.ray.cluster import find_models, is_loaded_later

        cluster, _ = self._connect()
        try:
            found = find_models(await cluster.states(), self.resources.loaded.settings.ray_application)
        except ShoalError:
            return []
        return [
            Entry(name=name, source=str(one), backend="ray", managed=is_loaded_later(one))
            for name, one in found.items()
        ]

    def _connect(self) -> tuple[Cluster, StatusWatch]:
        from shoal.backends.ray.cluster import Cluster
        from shoal.backends.ray.watch import StatusWatch

        if self._cluster is None or self._watch is None:
            self._cluster = Cluster()
            self._watch = StatusWatch(self._cluster)
        return self._cluster, self._watch


BACKEND = RayBackend
