"""Style and script of the page of a report, and its style within a page of others."""

from __future__ import annotations

__all__ = ["FRAGMENT", "FRAGMENT_STYLE", "SCRIPT", "STYLE"]

STYLE = """
:root { --ink: #1b1f24; --paper: #fff; --soft: #f4f5f7; --line: #d5d9de; --dim: #5c6670;
  --bad: #b3261e; --good: #1a7f37; --odd: #8a6100; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #15181c;
  --soft: #1f242a; --line: #3a424b; --dim: #9aa4af; --bad: #ff8a80; --good: #6fdd8b;
  --odd: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0 0 .4rem; }
p { margin: .3rem 0; } footer { color: var(--dim); font-size: .85rem; margin-top: 2rem; }
pre, code { font: .84rem/1.45 ui-monospace, monospace; }
pre { background: var(--soft); padding: .6rem; margin: .4rem 0; border-radius: 6px;
  white-space: pre-wrap; }
.cause { border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 6px;
  padding: .7rem; margin: .7rem 0; }
details { margin: .3rem 0; } details details { margin-left: .5rem; }
summary { cursor: pointer; padding: .15rem 0; }
.failure > p { color: var(--dim); }
.verdict { font-weight: 700; } .passed { color: var(--good); }
.failed, .error, .crashed, .timed { color: var(--bad); font-weight: 600; }
.suspect { color: var(--odd); }
figure { margin: .6rem 0; } figcaption, small { color: var(--dim); font-size: .84rem; }
.maps { display: flex; flex-wrap: wrap; gap: 1rem; }
.maps > div { flex: 1 1 8rem; min-width: 0; } .maps small { display: block; }
svg { width: 100%; height: auto; border: 1px solid var(--line); display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
td, th { text-align: left; padding: .15rem .8rem .15rem 0; vertical-align: top; }
.none { color: var(--dim); }
button { font: inherit; font-size: .84rem; color: var(--ink); background: var(--soft);
  border: 1px solid var(--line); border-radius: 6px; padding: .15rem .7rem; cursor: pointer; }
"""

FRAGMENT = "npattn-report"
"""Class of the element to which the style of a fragment is confined."""
# Nested in a rule, a selector holds for what is inside alone. Notebooks colour text and rows.
INSIDE = STYLE.replace(":root", "&").replace("body", "&").replace("main", "&")
FRAGMENT_STYLE = f""".{FRAGMENT} {{ {INSIDE}
table, pre, code {{ color: inherit; }} tr {{ background: none !important; }} }}
"""

SCRIPT = """
function select(code) {
  const range = document.createRange();
  range.selectNodeContents(code);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
addEventListener('click', async (event) => {
  const button = event.target.closest('.copy');
  if (!button) return;
  const code = button.nextElementSibling;
  select(code);
  // A page opened from a file may have no clipboard: then the text is selected.
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = 'copied'; }
  catch (error) { button.textContent = document.execCommand('copy') ? 'copied' : 'selected'; }
});
"""
