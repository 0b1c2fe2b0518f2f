// Page behaviour: theme, verdict filter, calculator. The page reads without it.

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
  search.parentElement.hidden = false;
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of document.querySelectorAll("#figure-list > li")) {
      const paper = group.firstChild.textContent;
      const lines = [...group.querySelectorAll("li")];
      for (const line of lines) {
        const text = `${paper} ${line.textContent} ${line.firstChild.hash}`.toLowerCase();
        line.hidden = !words.every((word) => text.includes(word));
      }
      group.hidden = lines.every((line) => line.hidden);
    }
  });

  // A link to something inside a closed <details> opens it.
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1).split("?")[0]);
    const details = target && target.closest("details");
    if (details) details.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  attach(document.getElementById("calculator-form"), document.getElementById("calculator-output"));
  if (location.hash.startsWith("#calculator?")) document.getElementById("calculator").scrollIntoView();
})();
