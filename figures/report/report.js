// Page behaviour: theme, filters, search, sorting. The page reads without it.

(() => {
  const theme = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  let chosen = "auto";
  try { chosen = localStorage.getItem("theme") || "auto"; } catch { /* storage may be off */ }
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    theme.textContent = `Theme: ${chosen}`;
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    chosen = order[(order.indexOf(chosen) + 1) % order.length];
    try { localStorage.setItem("theme", chosen); } catch { /* as above */ }
    show();
  });
  show();

  const filters = [...document.querySelectorAll(".filter")];
  for (const button of filters) button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    for (const other of filters) other.setAttribute("aria-pressed", String(other === button && on));
    for (const row of document.querySelectorAll("#verdicts tbody tr"))
      row.hidden = on && !row.querySelector(`.mark.${button.dataset.kind}`);
  });

  const search = document.getElementById("figure-search");
  search.closest(".search").hidden = false;
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of document.querySelectorAll("#thumbnails .paper")) {
      const paper = group.querySelector("h3").textContent;
      const pictures = [...group.querySelectorAll("li")];
      for (const picture of pictures) {
        const text = `${paper} ${picture.textContent} ${picture.firstChild.hash}`.toLowerCase();
        picture.hidden = !words.every((word) => text.includes(word));
      }
      group.hidden = pictures.every((picture) => picture.hidden);
    }
  });

  // A table of class sortable: headings sort it, the fields before it choose rows by a column.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], lines = [...body.rows];
    const key = (line, column) => {
      const cell = line.cells[column], value = cell.dataset.key ?? cell.textContent;
      return value === "" || isNaN(value) ? value : Number(value);
    };
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.ariaSort === "ascending" ? -1 : 1;
        for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
        heading.ariaSort = down > 0 ? "ascending" : "descending";
        const compare = (a, b) => {
          const [x, y] = [key(a, heading.cellIndex), key(b, heading.cellIndex)];
          if (x === y) return 0;
          if (x === "" || y === "") return x === "" ? 1 : -1; // what is unknown comes last
          return (x < y ? -1 : 1) * down;
        };
        body.append(...lines.toSorted(compare));
      });
    }
    const choices = table.closest("section").querySelector(".choices");
    const fields = [...choices.querySelectorAll("select")];
    const choose = () => {
      for (const line of lines) line.hidden = fields.some(
        (field) => field.value && line.cells[field.dataset.column].textContent !== field.value);
      const left = lines.filter((line) => !line.hidden).length;
      choices.querySelector("output").textContent = `${left} of ${lines.length} rows`;
    };
    for (const field of fields) field.addEventListener("change", choose);
    choices.hidden = false;
    choose();
  }

  // A link to something inside a closed <details> opens it.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    const details = target && target.closest("details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
