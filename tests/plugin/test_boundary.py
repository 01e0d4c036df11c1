import asyncio

import pytest

from miles_core.errors import PluginError
from miles_core.plugin.boundary import Wrapper, compose


def adding(mark, **options):
    def wrap(inner):
        def around(values):
            if options.get("fail"):
                raise ValueError(mark)
            return [mark, *inner(values)]

        return around

    return Wrapper(mark, "wrap_forward", wrap)


def notes(error):
    return getattr(error, "__notes__", [])


def test_the_first_wrapper_is_the_outermost():
    assert compose(lambda values: values, [adding("a"), adding("b")])(["x"]) == ["a", "b", "x"]


def test_without_wrappers_nothing_is_added():
    def inner(values):
        return values

    assert compose(inner, []) is inner


@pytest.mark.parametrize("failing", ["a", "b"])
def test_an_exception_names_the_plugin_it_came_from_and_no_other(failing):
    chain = [adding(name, fail=name == failing) for name in "ab"]
    with pytest.raises(ValueError, match=failing) as raised:
        compose(lambda values: values, chain)([])
    assert notes(raised.value) == [f"in plugin {failing}, hook wrap_forward"]


def test_an_exception_of_core_blames_no_plugin():
    def inner(values):
        raise KeyError("core")

    with pytest.raises(KeyError) as raised:
        compose(inner, [adding("a"), adding("b")])([])
    assert notes(raised.value) == []


def test_async_functions_are_guarded():
    async def inner(step):
        return [step]

    def wrap(inner):
        async def around(step):
            if step:
                raise ValueError("late")
            return [*await inner(step), "a"]

        return around

    rollout = compose(inner, [Wrapper("a", "wrap_learn", wrap)])
    assert asyncio.run(rollout(0)) == [0, "a"]
    with pytest.raises(ValueError, match="late") as raised:
        asyncio.run(rollout(1))
    assert notes(raised.value) == ["in plugin a, hook wrap_learn"]


def test_a_callable_object_that_is_async_is_guarded():
    class Generate:
        async def __call__(self, sample):
            raise ValueError(sample)

    with pytest.raises(ValueError, match="x") as raised:
        asyncio.run(compose(lambda s: None, [Wrapper("a", "wrap_learn", lambda inner: Generate())])("x"))
    assert notes(raised.value) == ["in plugin a, hook wrap_learn"]


def test_async_generators_are_guarded():
    def wrap(inner):
        async def around():
            async for item in inner():
                yield item
            raise ValueError("end")

        return around

    async def inner():
        yield 1

    async def collect():
        return [item async for item in compose(inner, [Wrapper("a", "wrap_learn", wrap)])()]

    with pytest.raises(ValueError, match="end") as raised:
        asyncio.run(collect())
    assert notes(raised.value) == ["in plugin a, hook wrap_learn"]


@pytest.mark.parametrize("plain", [True, False])
def test_streams_are_guarded_while_they_are_read(plain):
    def encode(units):
        for unit in units:
            if unit == 2:
                raise ValueError("unit 2")
            yield unit

    def wrap(inner):
        if plain:
            return lambda: encode(inner())

        def around():
            yield from encode(inner())

        return around

    stream = compose(
        lambda: iter([1, 2]), [Wrapper("a", "wrap_weights", wrap), Wrapper("b", "wrap_weights", lambda f: f)]
    )()
    assert next(stream) == 1
    with pytest.raises(ValueError, match="unit 2") as raised:
        next(stream)
    assert notes(raised.value) == ["in plugin a, hook wrap_weights"]


def test_a_wrapper_that_returns_no_function_is_refused():
    with pytest.raises(PluginError, match="plugin a: wrap_forward wrapped with something that returned None"):
        compose(lambda values: values, [Wrapper("a", "wrap_forward", lambda inner: None)])


def test_a_composed_function_compiles_in_one_graph():
    torch = pytest.importorskip("torch")

    def wrap(inner):
        return lambda x: inner(x) * 2

    def inner(x):
        return x + 1

    composed = compose(inner, [Wrapper("a", "wrap_forward", wrap), Wrapper("b", "wrap_forward", wrap)])
    compiled = torch.compile(composed, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [8.0, 8.0]
