"""Every error of npattn's is one class of its own kind, and also the built-in one of that kind."""

import pytest

from npattn import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.OptionError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.UnknownOptionError, TypeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_errors_derive_from_npattn_error_and_a_built_in(error, builtin):
    assert issubclass(error, errors.NpattnError)
    assert issubclass(error, builtin)


def test_all_names_every_error_class():
    classes = {n for n, c in vars(errors).items() if isinstance(c, type)}
    assert set(errors.__all__) == classes
