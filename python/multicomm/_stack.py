"""The Python stack of the main thread, for whoever looks at the job from outside."""

from __future__ import annotations

import linecache
import sys
import threading

_MOST_FRAMES = 60


def main_thread() -> str:
    """Called by a thread of the extension, while the main thread is anywhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "main thread: has ended"
    lines = ["main thread, most recent call first:"]
    frames = 0
    while frame is not None:
        frames += 1
        if frames <= _MOST_FRAMES:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
            source = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
            if source:
                lines.append(f"    {source}")
        frame = frame.f_back
    if frames > _MOST_FRAMES:
        lines.append(f"  ... {frames - _MOST_FRAMES} more calls")
    return "\n".join(lines)
