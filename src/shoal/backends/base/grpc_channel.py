"""Options of the gRPC channels to servers."""

from __future__ import annotations

from typing import Any

ChannelOptions = tuple[tuple[str, Any], ...]

CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_send_message_length", -1),
    # The client reconnects to a restarted server within a second instead of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # gRPC shares connections between channels of the same target and options, and with them their backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Calls go directly to the server: no proxy from the environment, no service configuration from DNS.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)
