"use strict";
// Tables sort by a click on a heading, and longer ones have a field that filters their rows.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], rows = [...body.rows];
  const value = (row, at) => {
    const cell = row.cells[at];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isNumber = head.classList.contains("number"), before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : isNumber;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      // Unknown values come last.
      const known = (row) => !(isNumber && row.cells[at].dataset.value === undefined);
      rows.sort((a, b) => known(b) - known(a) || (down ? -1 : 1) * compare(value(a, at), value(b, at)));
      body.append(...rows);
    });
  });
  if (rows.length > 7) {
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "filter rows";
    field.setAttribute("aria-label", "Filter the rows");
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of rows) {
        const text = [...row.cells].map((cell) => `${cell.textContent} ${cell.title}`).join(" ");
        row.hidden = !text.toLowerCase().includes(wanted);
      }
    });
    table.before(field);
  }
}
