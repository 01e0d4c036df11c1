"""One folder holds what later runs reuse; two environment variables move it."""

from pathlib import Path

from miles_core.cache_folder import cache_folder


def test_the_folder_can_be_moved():
    assert cache_folder({}) == Path.home() / ".cache" / "miles"
    assert cache_folder({"XDG_CACHE_HOME": "/far"}) == Path("/far/miles")
    assert cache_folder({"XDG_CACHE_HOME": "/far", "MILES_CACHE": "~/near"}) == Path.home() / "near"
