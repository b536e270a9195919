"""Where a replica's own log lines go."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from plait_disagg.request_log import add_requests

LOG_PATH_VARIABLE = "PLAIT_LOG_PATH"
"""Set by `plait serve` for everything it starts: all processes append to one file, whole lines at a time."""

OUR_LOGGERS = ("plait", "plait_serving", "plait_disagg", "plait_fabric", "plait_kernels")


def configure_logging(replica: str, environ: Mapping[str, str]) -> None:
    """Send our loggers' lines, from INFO up, with the ids of the requests that they are about, to the file of
    `LOG_PATH_VARIABLE`, else to stderr (which Ray keeps)."""
    path = environ.get(LOG_PATH_VARIABLE)
    try:
        handler: logging.Handler = logging.FileHandler(path) if path else logging.StreamHandler()
    except OSError:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {replica} %(name)s: %(message)s%(requests)s"))
    handler.addFilter(add_requests)
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
