// Small things that HTML and CSS cannot do: sort tables, let keys scroll what scrolls, start the live explainer.
addEventListener('DOMContentLoaded', () => {
  for (const table of document.querySelectorAll('table.sortable')) {
    const value = (row, i) => row.cells[i].dataset.sort ?? row.cells[i].textContent.trim()
    const isNumber = text => text !== '' && Number.isFinite(Number(text))
    table.querySelectorAll('th button').forEach((button, i) => button.addEventListener('click', () => {
      const heading = button.parentElement
      const rows = [...table.tBodies[0].rows]
      const numeric = rows.every(row => value(row, i) === '' || isNumber(value(row, i)))
      const first = numeric ? 'descending' : 'ascending'              // the largest numbers, the first letters
      const second = numeric ? 'ascending' : 'descending'
      const order = heading.getAttribute('aria-sort') === first ? second : first
      table.querySelectorAll('th').forEach(th => th.removeAttribute('aria-sort'))
      heading.setAttribute('aria-sort', order)
      const sign = order === 'ascending' ? 1 : -1
      const difference = (a, b) => numeric ? a - b : a.localeCompare(b, 'en', {numeric: true})
      rows.sort((a, b) => {
        const [left, right] = [value(a, i), value(b, i)]
        if (left === '' || right === '') return (left === '') - (right === '')      // empty cells stay below
        return sign * difference(left, right)
      })
      table.tBodies[0].append(...rows)
    }))
  }

  // Wide code, pictures and outputs scroll inside their box; the keyboard must reach them. To measure the boxes, the
  // whole page must be laid out, which takes a phone a second: not before somebody uses the keyboard.
  const boxes = 'pre, .cell_output .output, .cell_output, .pst-scrollable-table-container, div.math'
  addEventListener('keydown', ({key}) => {
    if (key !== 'Tab') return
    const scrolls = box => box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1
    const found = [...document.querySelectorAll(boxes)].filter(scrolls)       // measure all, then change all
    for (const box of found) box.tabIndex = 0
  }, {capture: true})

  // The live views of the pages, and the live explainer on the front page, load when they are asked for.
  // They are light or dark as this page is.
  const theme = () => document.documentElement.dataset.theme
  const frame = address => Object.assign(document.createElement('iframe'),
    {src: `${address}${address.includes('#') ? '&' : '#'}theme=${theme()}`, title: 'A Transformer, live'})
  new MutationObserver(() => {
    for (const {contentWindow} of document.querySelectorAll('iframe')) contentWindow.postMessage({theme: theme()}, '*')
  }).observe(document.documentElement, {attributes: true, attributeFilter: ['data-theme']})
  for (const view of document.querySelectorAll('details.live-view'))
    view.addEventListener('toggle', () => view.append(frame(view.dataset.address)), {once: true})

  const live = document.querySelector('#live[data-explainer]')
  const wide = matchMedia('(min-width: 700px)')
  live?.querySelector('.start-live').addEventListener('click', event => {
    if (!wide.matches) return          // on a phone, the explainer gets the whole screen
    event.preventDefault()
    live.replaceChildren(frame(live.dataset.explainer))
    live.scrollIntoView()
  })
})
