"""What vLLM loads of radixkv in each of its processes (entry points of `vllm.general_plugins`), and which vLLM will do.

`VLLM_PLUGINS=radixkv vllm serve MODEL` is `vllm serve MODEL --scheduler-cls radixkv.integrations.vllm.RadixScheduler`.
`VLLM_PLUGINS=radixkv,radixkv_attention` has our attention besides: on a CPU at once, on a GPU with
`--attention-backend CUSTOM`. Merely installed, neither changes anything.
"""

import re
from functools import wraps
from typing import Any

SCHEDULER = "radixkv.integrations.vllm.RadixScheduler"
OLDEST = (0, 32)


def check_version(version: str) -> None:
    """Raises ImportError, which names the version and what was expected, unless this vLLM is new enough."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise ImportError(f"vllm: expected version {'.'.join(map(str, OLDEST))} or later, got {version}")


def register() -> None:
    """Makes the tree's scheduler the default where VLLM_PLUGINS names radixkv; nothing where it is merely installed.

    A scheduler that is asked for by name stays what it is. Calling it again does nothing.

    Raises:
        ImportError: VLLM_PLUGINS names radixkv, and this vLLM is too old.
    """
    if not _is_named("radixkv"):
        return
    from vllm.config import SchedulerConfig

    plain = SchedulerConfig.get_scheduler_cls
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def get_scheduler_cls(config: Any) -> Any:
        if config.scheduler_cls is None:
            config.scheduler_cls = SCHEDULER
        return plain(config)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def register_attention() -> None:
    """Makes our attention vLLM's CUSTOM backend, on a CPU its only one, where VLLM_PLUGINS names radixkv_attention.

    Raises:
        ImportError: VLLM_PLUGINS names radixkv_attention, and this vLLM is too old.
    """
    if _is_named("radixkv_attention"):
        from radixkv_kernels.integrations.vllm import register

        register()


def _is_named(plugin: str) -> bool:
    """Whether VLLM_PLUGINS names a plugin; ImportError where it does, and this vLLM is too old."""
    from vllm import __version__, envs

    is_named = plugin in (envs.VLLM_PLUGINS or ())
    if is_named:
        check_version(__version__)
    return is_named
