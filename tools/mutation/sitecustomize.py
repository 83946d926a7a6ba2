"""Python runs this at its start where its folder is on PYTHONPATH: in the processes that tests start."""

import os

if "MUTATE_RECORD" in os.environ and "PYTEST_CURRENT_TEST" in os.environ:
    import recorder  # noqa: F401
if "MUTATE_SOURCE" in os.environ:
    import hook

    hook.install()
