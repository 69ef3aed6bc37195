"""What a host tells routers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.hierarchy.cache import Hierarchy
from kvtier_services.settings import Settings, host_name

if TYPE_CHECKING:
    from kvtier.events.publisher import Publisher

log = logging.getLogger(__name__)


def open_events(hierarchy: Hierarchy, settings: Settings) -> Publisher | None:
    """Publish the events of a host, if it shall; one that cannot listen serves without, and says so in its status."""
    events, host = settings.config.events, host_name()
    if not events.endpoint:
        return None
    from kvtier.events.publisher import Publisher

    endpoint, replay_endpoint = events.endpoints
    publisher = Publisher(
        hierarchy.state,
        endpoint,
        replay_endpoint=replay_endpoint,
        node=host,
        topic=events.topic.replace("{host}", host),
        buffer=events.buffer,
    )
    if publisher.fault:
        log.warning("events off: %s", publisher.fault)
    return publisher
