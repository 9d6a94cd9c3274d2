"""Notification: a process receives notifications, also those sent before it listened."""

import asyncio
import os
import signal
import subprocess
import sys

from service.supervisor.notification import NOTIFY_SIGNAL, SupervisorNotifier

# Notified before it listens, like a worker that still imports torch: the signal waits and does not end the process.
EARLY = """
import asyncio, os, signal
from service.supervisor.notification import NOTIFY_SIGNAL, SupervisorNotifier
os.kill(os.getpid(), NOTIFY_SIGNAL)

async def main():
    heard = asyncio.Event()
    SupervisorNotifier().listen(heard.set)
    await asyncio.wait_for(heard.wait(), 20)
    print("heard")

asyncio.run(main())
"""


def test_a_notification_before_the_listener_is_delivered_later():
    code = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n{EARLY}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "heard\n"


def test_a_worker_notifies_only_its_parent(monkeypatch):
    rung = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: rung.append((pid, signum)))
    monkeypatch.setattr(os, "getppid", lambda: 4321)  # not the test's real parent, which may be process 1
    notifier = SupervisorNotifier()
    notifier.notify()
    assert rung == [(4321, NOTIFY_SIGNAL)]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    notifier.notify()
    assert len(rung) == 1, "it was orphaned, and its new parent has nothing to do with it"


def test_each_notification_is_handled_on_the_loop():
    async def main():
        heard = asyncio.Event()
        SupervisorNotifier().listen(heard.set)
        try:
            for _ in range(3):
                os.kill(os.getpid(), NOTIFY_SIGNAL)
                await asyncio.wait_for(heard.wait(), 10)
                heard.clear()
        finally:
            asyncio.get_running_loop().remove_signal_handler(NOTIFY_SIGNAL)

    before = signal.getsignal(NOTIFY_SIGNAL)
    try:
        asyncio.run(main())
    finally:
        signal.signal(NOTIFY_SIGNAL, before)
