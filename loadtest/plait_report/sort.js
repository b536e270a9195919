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
