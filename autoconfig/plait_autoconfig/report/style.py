"""What the tuning report adds to the style of the load test's report, and its one script."""

from plait_loadtest.report.style import CSS as LOADTEST_CSS

CSS = (
    LOADTEST_CSS
    + """
h1.none { color: var(--bad); } h1.unsure { color: var(--warn); }
.lead + .lead { margin-top: 8px; color: var(--soft); font-size: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); }
.tiles dd { font-size: 22px; } .tiles .was { display: block; color: var(--soft); font-size: 13px; font-weight: 400;
  letter-spacing: 0; white-space: normal; }
.narrow { display: none; }
.dot { fill: var(--accent); fill-opacity: 0.8; stroke: none; } .dot.over { fill: var(--card); fill-opacity: 1;
  stroke: var(--bad); stroke-width: 1.6; } .dot.failed { fill: none; stroke: var(--bad); stroke-width: 1.8; }
.dot.reference { fill: var(--soft); fill-opacity: 0.75; } .dot.confirm { fill: var(--card); fill-opacity: 1;
  stroke: var(--accent); stroke-width: 2.2; } .dot.chosen { stroke: var(--ink); stroke-width: 2; }
.legend line { stroke: var(--ink); stroke-width: 1.4; stroke-dasharray: 4 3; } .default { stroke: var(--ink);
  stroke-width: 1.2; stroke-dasharray: 4 3; opacity: 0.7; }
.refused { fill: var(--bad-soft); } svg .name { fill: var(--ink); }
section > .legend { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 14px 0 0; font-size: 13px; max-width: none; }
.legend span { display: inline-flex; align-items: center; gap: 7px; } .legend svg { width: 14px; height: 14px;
  flex: none; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 10px 14px; align-items: center;
  margin: 18px 0 0; padding: 20px; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  font-size: 14.5px; }
.bars i { display: block; height: 14px; border-radius: 3px; background: var(--accent); opacity: 0.75; min-width: 2px; }
.bars b { font-weight: 500; text-align: right; }
.slices { display: grid; grid-template-columns: repeat(auto-fill, minmax(270px, 1fr)); gap: 16px; margin-top: 18px; }
.slices figure { margin: 0; padding: 14px 14px 8px; }
td.plain { text-align: left; } td.changed { color: var(--accent); font-weight: 600; } td.quiet { color: var(--soft); }
td.text { min-width: 15em; }
th button { all: unset; cursor: pointer; } th button:hover { color: var(--ink); }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 3px; }
th[aria-sort=ascending] button::after { content: " \\2191"; } th[aria-sort=descending] button::after
  { content: " \\2193"; }
.command { margin-top: 18px; padding: 16px 20px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: 6px 24px; margin: 18px 0 0; font-size: 15px; }
dl.facts dt { color: var(--soft); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 800px) { .wide { display: none; } .narrow { display: block; max-width: 520px; margin: 0 auto; }
  svg text { font-size: 12px; } figure { padding: 14px 10px 8px; } .tiles dd { font-size: 20px; }
  .tiles { grid-template-columns: repeat(2, 1fr); } .bars { gap: 10px; padding: 16px; }
  .scroll { padding: 6px 14px; } dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: 8px; } }
"""
)

SCRIPT = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const at = [...head.parentNode.children].indexOf(head);
  const key = row => row.children[at].dataset.sort ?? row.children[at].textContent;
  const order = (a, b) => (a === "") - (b === "")
    || down * (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
  for (const each of head.parentNode.children) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
});
"""
"""Sorts a table by the column whose header is clicked; rows without a value stay last. The page is complete without
it."""
