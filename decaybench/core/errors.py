"""The two ways in which decaybench gives up. The command line turns them into exit codes 2 and 1."""


class UserError(Exception):
    """Wrong usage or input. The message is one line that names the key, the value and a way out."""


class RunError(Exception):
    """Right usage, but the work could not be finished: a full disk, a locked folder, a damaged file."""
