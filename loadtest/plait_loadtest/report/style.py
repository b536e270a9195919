"""The style of the HTML report: one accent colour, system fonts, light or dark by the reader's own setting."""

CSS = """
:root { color-scheme: light dark; --paper: #fbfbfa; --card: #ffffff; --ink: #1c1d21; --soft: #62656d; --line: #e4e4e1;
  --grid: #ececea; --accent: #2f5fd0; --accent-soft: #2f5fd022; --bad: #b8392b; --bad-soft: #b8392b1f; --warn:
  #96650a; }
@media (prefers-color-scheme: dark) { :root { --paper: #131417; --card: #1b1d21; --ink: #e9e9e6; --soft: #9da1aa;
  --line: #2c2f35; --grid: #26292e; --accent: #86a9ff; --accent-soft: #86a9ff2b; --bad: #ff8f80; --bad-soft: #ff8f802b;
  --warn: #e6b450; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1060px; margin: 0 auto; padding: 56px 32px 96px; }
h1, h2, p { margin: 0; }
.over { color: var(--soft); font-size: 14px; }
h1 { font-size: 40px; line-height: 1.15; font-weight: 650; letter-spacing: -0.02em; margin: 10px 0 12px; }
h1.met { color: var(--accent); } h1.missed { color: var(--bad); } h1.invalid { color: var(--warn); }
.lead { font-size: 18px; max-width: 52em; text-wrap: balance; }
.reasons { margin: 16px 0 0; padding: 0 0 0 20px; color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(112px, 1fr)); margin: 40px 0 8px;
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; }
.tiles div { box-shadow: 1px 0 0 var(--line), 0 1px 0 var(--line); padding: 16px 18px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; } .tiles dd { margin: 2px 0 0; font-size: 24px; font-weight: 600;
  letter-spacing: -0.01em; white-space: nowrap; } .tiles small { color: var(--soft); font-size: 13px; font-weight: 400;
  margin-left: 3px; } .tiles dd.bad { color: var(--bad); }
section { margin-top: 56px; }
h2 { font-size: 20px; font-weight: 620; letter-spacing: -0.01em; }
section > p { color: var(--soft); margin-top: 4px; max-width: 52em; font-size: 15px; }
figure { margin: 18px 0 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px 20px 12px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); } svg .strong { fill: var(--ink); font-weight: 600; }
svg .accent { fill: var(--accent); font-weight: 600; } svg .bad { fill: var(--bad); font-weight: 600; }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); } .slo { stroke: var(--bad); stroke-dasharray: 5 4; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }
.dot { fill: var(--accent); fill-opacity: 0.28; } .dot.over { fill: var(--bad); fill-opacity: 0.6; }
.band { fill: var(--accent-soft); } .line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin:
  round; }
.line.quiet { stroke: var(--soft); stroke-width: 1.5; } .bar { fill: var(--accent); fill-opacity: 0.75; }
.bar.over { fill: var(--bad); fill-opacity: 0.8; } .bar.s1 { fill-opacity: 0.55; } .bar.s2 { fill-opacity: 0.35; }
.bar.s3 { fill-opacity: 0.2; }
.scroll { overflow-x: auto; margin-top: 18px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 6px 20px; }
table { border-collapse: collapse; width: 100%; font-size: 14.5px; }
th, td { text-align: right; padding: 10px 0 10px 20px; white-space: nowrap; } th:first-child, td:first-child {
  text-align: left; padding-left: 0; } td.text, th.text { text-align: left; white-space: normal; }
td.text { overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; } tbody th { font-weight: 600; }
tbody tr { border-top: 1px solid var(--line); } td.bad { color: var(--bad); font-weight: 600; }
td.good { color: var(--accent); font-weight: 600; }
details { margin-top: 18px; background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
summary { cursor: pointer; padding: 14px 20px; font-weight: 600; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 12px; }
pre { margin: 0; padding: 4px 20px 20px; overflow-x: auto; font: 13px/1.6 ui-monospace, "SF Mono", Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
footer { margin-top: 56px; color: var(--soft); font-size: 14px; }
@media (max-width: 640px) { main { padding: 32px 18px 64px; } h1 { font-size: 30px; } svg text { font-size: 20px; } }
@media print { body { background: none; } figure, .scroll, details { break-inside: avoid; } }
"""
