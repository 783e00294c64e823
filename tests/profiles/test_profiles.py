"""Profiles of known systems, held against the systems that are installed."""

import importlib
import inspect
import pkgutil

import pytest

from npattn import profiles
from npattn.errors import OptionError
from npattn.profiles import PROFILES, Profile

# The callable of a profile, where its signature can be read.
CALLABLES = {
    "jax.nn": ("jax.nn", "dot_product_attention"),
    "flax": ("flax.linen", "dot_product_attention"),
    "flex": ("torch.nn.attention.flex_attention", "flex_attention"),
    "keras": ("keras.ops", "dot_product_attention"),
    "transformers": ("transformers.models.llama.modeling_llama", "eager_attention_forward"),
    "torch.mha": ("torch.nn", "MultiheadAttention"),
}


def test_every_profile_stands_under_its_name():
    assert all(profile.name == name for name, profile in PROFILES.items())


def test_every_profile_of_a_module_is_known():
    modules = [m.name for m in pkgutil.iter_modules(profiles.__path__, "npattn.profiles.")]
    written = [vars(importlib.import_module(name)).values() for name in modules]
    made = [one for values in written for one in values if isinstance(one, Profile)]
    assert len(made) > 60
    assert all(PROFILES[one.name] is one for one in made)


def test_a_version_has_its_system_beside_it():
    for name, profile in PROFILES.items():
        system, at, version = name.partition("@")
        assert system in PROFILES
        assert not at or f"{profile.version}.".startswith(f"{version}.")


def test_an_unknown_meaning_is_named():
    with pytest.raises(OptionError, match="signature of mine reads p as 'dropout', must be one of"):
        Profile(name="mine", version="1", about="", signature={"p": "dropout"})


@pytest.mark.parametrize("name", CALLABLES)
def test_the_system_has_the_parameters_of_its_profile(name):
    module, function = CALLABLES[name]
    f = getattr(pytest.importorskip(module), function)
    f = getattr(f, "forward", f)  # of a module
    assert set(PROFILES[name].signature) <= set(inspect.signature(f).parameters)


def test_torch_has_the_parameters_of_its_profile():
    torch = pytest.importorskip("torch")
    doc = torch.nn.functional.scaled_dot_product_attention.__doc__
    assert all(f"{theirs}=" in doc for theirs in PROFILES["torch.sdpa"].signature)


def test_onnx_has_the_parameters_of_its_profile():
    defs = pytest.importorskip("onnx").defs
    schema = defs.get_schema("Attention", 25)
    names = {x.name for x in schema.inputs} | set(schema.attributes)
    assert set(PROFILES["onnx"].signature) <= names


def test_npattn_loads_profiles_on_first_use():
    import npattn

    assert npattn.profiles is importlib.import_module("npattn.profiles")
