"""What the unit tests share: properties are tested without a limit on the time of an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tracepipe", deadline=None)  # machines that run tests are shared
settings.load_profile("tracepipe")
