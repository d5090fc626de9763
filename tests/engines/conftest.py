"""Where the serving engine is. Run these tests with `pytest -m engine`, after
`bash scripts/engine_env.sh`."""

from __future__ import annotations

import os
import warnings

import pytest

from engines.vllm_server import engine_python
from trainer.errors import UserError


@pytest.fixture(scope="session")
def vllm_python():
    """vLLM's interpreter. Without one, tests are skipped aloud; where CI is set, they fail."""
    try:
        return engine_python()
    except UserError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        warnings.warn(f"NOTHING WAS CHECKED AGAINST vLLM: {error}", stacklevel=1)
        pytest.skip(f"not checked against vLLM: {error}")
