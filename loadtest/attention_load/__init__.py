"""The load test of the attention service: questions, references, shapes, objectives and reports around Locust.

Laws: nothing of the service and no torch is imported, so that it runs beside a container with `requirements.txt` alone;
only `user.py` imports Locust (`lead.py`, `crew.py`, `hand.py` are given
its environment), so that the rest is tried without it.
"""
