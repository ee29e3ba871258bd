"""What a check expects."""


def equal(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: {found!r} instead of {expected!r}")


def holds(condition, what):
    if not condition:
        raise AssertionError(what)


def size_text(size):
    """Bytes in the words of the page, written a second time."""
    for unit, factor in [("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]:
        if size >= factor:
            return f"{size // factor} {unit}" if size % factor == 0 else f"{size / factor:.1f} {unit}"
    return f"{size} B"
