"""The application over a service that makes up its images."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from support.http_app import make_client


@pytest.fixture
def service() -> FakeImageService:
    return FakeImageService()


@pytest.fixture
def client(service: FakeImageService) -> TestClient:
    return make_client(service)
