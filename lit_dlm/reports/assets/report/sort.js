// Tables are sorted by the column whose head is pressed; once more turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [parseFloat(value(a)), parseFloat(value(b))];
      if (column && !(isNaN(x) && isNaN(y))) return (isNaN(x) ? -1 : x) - (isNaN(y) ? -1 : y);
      return value(b).localeCompare(value(a), undefined, { numeric: true });
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
    table.tBodies[0].append(...rows);
  }));
}
