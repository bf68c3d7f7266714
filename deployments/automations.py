"""Automations that close gaps of Prefect's own: a flow run whose process vanished is marked as crashed."""

from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.settings import get_current_settings

ZOMBIES = "Headrace: flow runs without a heartbeat have crashed"
MISSED = 4
"""Heartbeats that may be missed; fewer would end healthy runs on a busy machine."""


def install() -> None:
    """Creates the automations that are not there yet."""
    try:
        Automation.read(name=ZOMBIES)
        return
    except ValueError:
        pass
    heartbeat = get_current_settings().flows.heartbeat_frequency or 180
    Automation(
        name=ZOMBIES,
        description="A killed worker or machine reports nothing; without this its runs stay Running for ever.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=MISSED * heartbeat),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat: its process is gone")],
    ).create()
