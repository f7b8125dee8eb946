"""The texts of a reference: the canary's questions, a short text, and a longer text for layers."""

from __future__ import annotations

# Arithmetic, copying, code, a non-Latin script and JSON: varied texts use many different tokens and
# experts.
QUESTIONS = (
    "What is 17 + 25? Answer with the number only.",
    "Repeat exactly these words and nothing else: copper lantern seventeen rivers",
    "Write a Python function that returns the n-th Fibonacci number.",
    "用一句话解释为什么天空是蓝色的。",
    'Answer with one JSON object: the keys are "city" and "country", the city is Lisbon.',
)
# Variables of common chat templates that switch reasoning off.
NO_THINKING = {"enable_thinking": False, "thinking": False}
PLAIN_TEXT = "The quick brown fox jumps over the lazy dog"
ANSWER_TOKENS = 16
# More than 128: a server with a wrong sliding window of 128 tokens then computes other values.
PROBE_TOKENS = 192
PROBE_LIMIT = 1100  # a longer text would cost too much
PROBE_TEXT = (
    "The harbour town of Elvik has two lighthouses. The older one, built"  # style: ignore
    " in 1794 of red granite,"
    " stands on the northern pier; the younger one was finished in 1921 and uses a Fresnel lens of"
    " the third order. Every morning at 5:40 the ferry leaves for the island of Runde with mail, 36"
    " crates of bread and about 120 passengers. In winter the crossing takes fifty-five minutes, in"
    " summer forty. Captain Ingrid Solberg keeps a log in which she notes the wind, the temperature"
    " of the water and each whale that she sees. On the third of May she wrote: wind south-west,"
    " force 4; water 7.5 degrees; two orcas near the reef, a calf between them. The school teaches"
    " navigation to children from the age of ten. def bearing(dx, dy): return atan2(dx, dy) is the"
    " first line of code that they write. Those who pass the examination get a brass compass, a"
    " chart of the fjord and a free ticket. Nobody remembers who"
    " began that custom, but the list of"
    " names in the library goes back to 1863. "
)


def probe_tokens(window: int | None, max_position: int | None) -> int:
    """The length of the longer text: 64 tokens more than the model's sliding window, if that is at
    most PROBE_LIMIT.
    """
    tokens = PROBE_TOKENS
    if window is not None and PROBE_TOKENS <= window + 64 <= PROBE_LIMIT:
        tokens = window + 64
    return min(tokens, max_position - 1) if max_position else tokens
