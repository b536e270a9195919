// The sections as tabs, by the pattern of WAI-ARIA: arrow keys move, the address keeps the choice.
const NAMES = ["images", "rank", "status"];

/** Wire the tabs. `watchers[name](isShown)` is told when a section comes and goes. */
export function wireTabs(watchers) {
  const tabs = NAMES.map((name) => document.getElementById(`tab-${name}`));
  const shown = () => tabs.filter((tab) => !tab.hidden);
  const choose = (name, isFocused = false) => {
    for (const tab of tabs) {
      const isChosen = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
      watchers[tab.id.slice(4)]?.(isChosen);
      if (isChosen && isFocused) tab.focus();
    }
    history.replaceState(null, "", `#${name}`);
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab.id.slice(4)));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const list = shown();
      choose(list[(list.indexOf(tab) + move + list.length) % list.length].id.slice(4), true);
      event.preventDefault();
    });
  }
  return {
    /** Show the section of the address if there is one, else `name`. */
    start(name) {
      const asked = location.hash.slice(1);
      choose(shown().some((tab) => tab.id === `tab-${asked}`) && document.body.dataset.ready === undefined ? asked : name);
    },
  };
}
