"""The eviction policies, one a file: a file of this folder that holds a subclass of `Policy` is one of them.

Options list it, the experiments measure it and the tests run on it because it is in POLICIES. docs/adding_a_policy.md
says how to write one.

>>> "sieve" in POLICIES
True
"""

from collections.abc import Iterable

from radixkv.cache.radix.eviction import Policy, check_policy
from radixkv.cache.registry import find_classes


def find_policies(package: str, folders: Iterable[str]) -> dict[str, type[Policy]]:
    """Returns lru, and the policy of each file of a package, by name.

    Args:
        package: its name.
        folders: its paths.

    Raises:
        ValueError: a file does not hold exactly one policy, or one of a name that is taken.
    """
    return {Policy.name: Policy} | find_classes(Policy, package, folders)


POLICIES = find_policies(__name__, __path__)


def make_policy(policy: str | Policy) -> Policy:
    """Returns a new policy of that name, or the policy given.

    Raises:
        ValueError: no policy has that name, or the policy given declares what has no meaning.
    """
    if isinstance(policy, Policy):
        return check_policy(policy)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    return check_policy(POLICIES[policy]())
