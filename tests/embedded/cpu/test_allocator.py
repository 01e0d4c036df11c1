import ctypes
import platform

from miles_embedded.cpu.allocator import keep_freed_memory


def test_glibc_is_told():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_another_library_is_left_alone(monkeypatch):
    def called(name):
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    monkeypatch.setattr(ctypes, "CDLL", called)
    assert keep_freed_memory() is False
