// Selections above the recipes, by method, model and hardware; without this script all rows are there.
const rows = [...document.querySelectorAll("[data-hardware]")].map((experiment) => {
  const row = experiment.closest("tr");
  const table = row.closest("table");
  // The theme puts a wide table into a box that scrolls, before or after this runs.
  const heading = (table.closest(".md-typeset__scrollwrap") ?? table).previousElementSibling;
  const method = heading.id;
  const model = row.cells[1].textContent;
  return { row, table, heading, method, model, hardware: experiment.dataset.hardware };
});
const bar = document.createElement("p");
const selects = ["method", "model", "hardware"].map((name) => {
  const select = document.createElement("select");
  select.name = name;
  select.append(new Option(`any ${name}`, ""));
  for (const value of [...new Set(rows.map((one) => one[name]))].sort()) {
    select.append(new Option(value, value));
  }
  select.addEventListener("change", show);
  bar.append(select, " ");
  return select;
});
rows[0].heading.before(bar);

function show() {
  for (const { heading, table } of rows) heading.hidden = table.hidden = true;
  for (const one of rows) {
    one.row.hidden = selects.some(({ name, value }) => value && one[name] !== value);
    if (!one.row.hidden) one.heading.hidden = one.table.hidden = false;
  }
}
