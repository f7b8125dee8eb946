"""Texts on which two tokenizers show every rule they could differ in."""

from __future__ import annotations

from collections.abc import Iterable

COUNT = 200

_WORDS = (
    "Hello world",
    "The capital of France is Paris.",
    "don't can't we've I'll they're I'm he'd it's",
    "DON'T CAN'T WE'VE I'LL THEY'RE I'M HE'D IT'S",
    "'s't're've'm'll'd",
    "camelCaseWord PascalCase snake_case kebab-case SCREAMING_CASE",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "a",
    "A",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "The quick brown fox jumps over the lazy dog.",
    "HTTPServer2Go iPhone15Pro x86_64 utf8mb4",
    "e.g. i.e. U.S.A. Dr. Smith's Ph.D.",
    "well-known state-of-the-art",
    "naïve café résumé coöperate",
    "Straße Größe Übermut ÄÖÜ äöü ß",
    "El niño comió piñas en España",
    "Où est la bibliothèque ?",
    "İstanbul ışık ŞĞÇ şğç",
    "Việt Nam đẹp lắm",
)
_DIGITS = (
    "0",
    "7",
    "42",
    "123",
    "1234",
    "12345",
    "123456789012345678901234567890",
    "3.14159",
    "1,000,000",
    "-273.15",
    "1e-10",
    "0x1F 0b1010 0o17",
    "2026-11-23T18:33:25Z",
    "192.168.0.1:8000",
    "+1 (555) 010-9999",
    "50%",
    "$9.99 €5 £3 ¥100",
    "a1b2c3",
    "1a2b3c",
    "v1.2.3-rc4",
    "007 0007 00007",
    "١٢٣٤ १२३४ ๑๒๓๔",
    "½ ¼ ² ³ ① Ⅳ",
    "In 1984, 451 people; in 2001, 9000.",
    " 1 22 333 4444 55555 666666",
)
_SPACES = (
    " ",
    "  ",
    "   ",
    "    ",
    "     ",
    "                ",
    " leading",
    "  two leading",
    "trailing ",
    "trailing two  ",
    "a b",
    "a  b",
    "a   b",
    "a    b     c      d",
    "\t",
    "\t\t",
    "\tindented",
    " \t mixed \t ",
    "a\tb",
    "\n",
    "\n\n",
    "\n\n\n",
    "a\nb",
    "a\n\nb",
    "a\n\n\nb",
    "line one\r\nline two\r\n",
    "\r",
    "\r\n\r\n",
    " \n ",
    "  \n  \n  ",
    "a \n b",
    "end\n",
    "end\n\n",
    "\n start",
    "no-break\u00a0space",
    "em\u2003space thin\u2009space",
    "ideographic\u3000space",
    "zero\u200bwidth\u200dspace",
    "\ufeffbyte order mark",
    "line\u2028separator\u2029paragraph",
    "vertical\vtab form\ffeed",
    "next\u0085line",
)
_CODE = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}",
    "if __name__ == '__main__':\n        main()",
    '{"key": [1, 2.5, null, true], "other": {"a": "b"}}',
    '<div class="x">&amp;</div>',
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    "x = y ** 2 // 3 % 4 <<= 1",
    "a->b::c.d()[0]",
    "#include <stdio.h>",
    "// comment\n/* block */",
    "https://example.com/path?query=1&other=two#part",
    "user.name+tag@example.co.uk",
    "C:\\Users\\me\\file.txt",
    "/usr/local/lib/python3.11/site-packages",
    "$HOME ${VAR} $(cmd) `tick`",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "...",
    "....",
    "-----",
    "=====",
    "######## heading",
    "* item\n  * nested\n    1. deeper",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "```python\nprint('hi')\n```",
    "\\frac{a}{b} \\alpha^2_{i,j}",
    "~~~ ^^^ ||| ``` '''",
    "lambda x: x if x else -x",
    "\u201cquoted\u201d \u2018single\u2019 \u2014 dash \u2026",
    "«guillemets» „unten“ ¿qué? ¡sí!",
    "()(){}{}[][]<><>",
    "a=b;c=d,e:f",
)
_SCRIPTS = (
    "你好，世界",
    "中文字符和English混合123",
    "日本語のテキストです。",
    "カタカナ ひらがな 漢字",
    "한국어 텍스트",
    "안녕하세요 세계",
    "Привет, мир!",
    "Съешь же ещё этих мягких французских булок",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "வணக்கம் உலகம்",
    "გამარჯობა მსოფლიო",
    "Բարեւ աշխարհ",
    "ሰላም ልዑል",
    "မင်္ဂလာပါ",
    "Ångström Ωmega µmeter",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛",
    "ﬁ ﬂ ǆ ĳ",
    "Ａｆｕｌｌ ｗｉｄｔｈ１２３",
)
_EMOJI = (
    "😀",
    "😀😃😄",
    "👍🏽",
    "👨‍👩‍👧‍👦",
    "🇩🇪🇫🇷",
    "❤️",
    "text 🎉 text",
    "🏳️‍🌈",
    "1️⃣2️⃣",
    "☃ ★ ♠ ✓ → ∞",
    "🦙.cpp",
    "∑∏∫√≤≥≠±",
    "─│┌┐└┘█▓▒░",
)
_MARKS = (
    "e\u0301",
    "e\u0301e\u0301 n\u0303 a\u0308",
    "Z\u0335\u0321\u0322a\u0338l\u0337g\u0336o\u0335",
    "\u0301",
    "a\u0300\u0301\u0302b",
    "क्\u200dष",
    "\u202eright to left\u202c",
    "\u00ad soft hyphen",
    "\x00",
    "\x01\x02\x7f",
    "\ufffd",
    "\U0010ffff",
    "\ue000 private",
)
_TOKENS_AS_TEXT = (
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "[INST] Hi [/INST]",
    "<|im_start",
    "<| im_start |>",
    "<0x0A>",
    "\u2581",
    "\u2581word",
    "Ġword",
    "<think>\n\n</think>",
    "<tool_call>{}</tool_call>",
)


def strings(special: Iterable[str]) -> list[str]:
    """COUNT texts: those above, with special tokens of the vocabulary in different surroundings,
    and pairs of them.
    """
    fixed = [
        "",
        *_WORDS,
        *_DIGITS,
        *_SPACES,
        *_CODE,
        *_SCRIPTS,
        *_EMOJI,
        *_MARKS,
        *_TOKENS_AS_TEXT,
    ]
    found = list(dict.fromkeys(fixed))
    tokens = sorted(special)
    # From both ends, so that few tokens and many give different ones
    chosen = [*tokens[:2], *tokens[-2:]]
    for place, token in enumerate(chosen):
        around = (token, f"a{token}b", f" {token} ", f"{token}\n{token}")
        found.append(around[place % len(around)])
    pairs = (f"{one} {other}" for one, other in zip(fixed[1:], fixed[30:], strict=False))
    for text in pairs:
        if len(found) >= COUNT:
            break
        found.append(text)
    return found[:COUNT]


CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": " What is 2 + 2?\n"},
    ],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Say “ok” 😀"},
    ],
)
