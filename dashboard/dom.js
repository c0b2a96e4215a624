// SPDX-License-Identifier: Apache-2.0
// Elements, tables and numbers. All text goes through textContent: names of workers and models are not trusted.

export const find = (id) => document.getElementById(id)

// element makes an element with properties, attributes in properties.attributes, and children.
export function element(name, { attributes = {}, ...properties } = {}, ...children) {
  const e = Object.assign(document.createElement(name), properties)
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value)
  e.append(...children)
  return e
}

// put writes a cell {text, value, tone, title, share} into an element, and only what has changed since the last call.
// value is the figure without rounding. tone is good, warn, bad, quiet or "": the text always says the same.
// share, from 0 to 1, draws a bar.
export function put(e, cell) {
  const old = e.shown ?? {}
  const { text = '–', value, tone = '', title = '', share } = cell
  if (text !== old.text) e.textContent = text
  if (value !== old.value) value === undefined ? delete e.dataset.value : (e.dataset.value = value)
  if (tone !== old.tone) tone ? (e.dataset.tone = tone) : delete e.dataset.tone
  if (title !== old.title) e.title = title
  if (share !== old.share) {
    e.classList.toggle('bar', share !== undefined)
    e.style.setProperty('--share', share === undefined ? 0 : Math.round(1000 * Math.min(1, share)) / 1000)
  }
  e.shown = { text, value, tone, title, share }
}

// Table keeps its rows and writes only cells that have changed. columns are {name, field, show(item), left, open}: left is
// for texts, open makes a button of the cell. The first column names the row. key(item) identifies an item.
export class Table {
  constructor(table, caption, columns, key) {
    this.columns = columns
    this.key = key
    this.heads = columns.map((c) => element('th', { scope: 'col', className: c.left ? 'left' : '' }, c.name))
    this.body = table.createTBody()
    table.prepend(element('caption', { className: 'unseen' }, caption))
    table.createTHead().append(element('tr', {}, ...this.heads))
    this.empty = element('p', { className: 'note', hidden: true })
    table.after(this.empty)
    this.table = table
  }

  fill(items, none) {
    const { rows } = this.body
    while (rows.length > items.length) this.body.deleteRow(-1)
    while (rows.length < items.length) this.body.append(this.row())
    items.forEach((item, i) => {
      const row = rows[i]
      const key = this.key(item)
      if (row.dataset.key !== key) row.dataset.key = key
      this.columns.forEach((column, j) => put(row.cells[j].target, column.show(item)))
    })
    this.table.hidden = items.length === 0
    put(this.empty, { text: none ?? 'None' })
    this.empty.hidden = items.length > 0
  }

  row() {
    const row = element('tr')
    this.columns.forEach((column, i) => {
      const cell = i === 0 ? element('th', { scope: 'row' }) : element('td')
      if (column.left) cell.className = 'left'
      cell.target = cell
      if (column.open) {
        cell.target = element('button', { type: 'button', className: 'link' })
        cell.append(cell.target)
      }
      cell.target.dataset.field = column.field
      row.append(cell)
    })
    return row
  }
}

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 })
const short = new Intl.NumberFormat('en', { maximumSignificantDigits: 3 })

// number shows a count with all digits, compact one with three significant digits from 100,000 on.
export const number = (n) => whole.format(n)

export function compact(n) {
  const size = Math.abs(n)
  if (size < 1e5) return whole.format(n)
  const [unit, name] = size < 1e6 ? [1e3, 'k'] : size < 1e9 ? [1e6, 'M'] : [1e9, 'G']
  return `${short.format(n / unit)} ${name}`
}

export const percent = (x) => `${(100 * x).toFixed(1)} %`

export const rate = (x) => (x < 10 ? x.toFixed(1) : whole.format(x))

// milliseconds and duration show a length of time, given in ms and in ns.
export function milliseconds(ms) {
  const size = Math.abs(ms)
  if (size < 1) return `${short.format(1000 * ms)} µs`
  return size < 1e4 ? `${short.format(ms)} ms` : `${short.format(ms / 1000)} s`
}
export const duration = (ns) => milliseconds(ns / 1e6)

export const clock = (time) => new Date(time).toLocaleTimeString('en-GB')

// count and plain are the cells of a figure and of a text.
export const count = (n, more) => (n === undefined ? {} : { text: number(n), value: n, ...more })
export const plain = (text, more) => ({ text: text || '–', value: text, ...more })

// workerName is the name that kvroute explain prints.
export const workerName = (w, name) => (name || String(w.worker_id)) + (w.dp_rank > 0 ? `/${w.dp_rank}` : '')
