// SPDX-License-Identifier: Apache-2.0
// The table of workers, the worst first, and the tables that count them: events by source, router groups, and workers
// that left.
import { Table, count, find, element, length, number, percent, plain, put, several, workerName } from './dom.js'

const pageSize = 50
const healths = { left: ['✕ left', 'bad'], unresolved: ['✕ no address', 'bad'], removed: ['○ removed', 'quiet'], healthy: ['● healthy', 'good'], degraded: ['▲ degraded', 'warn'], starting: ['▲ starting', 'warn'], unhealthy: ['✕ unhealthy', 'bad'], expired: ['✕ expired', 'bad'], not_ready: ['○ not ready', 'quiet'] }
const levels = { ok: ['●', 'good'], fault: ['▲', 'warn'], off: ['○', 'quiet'] } // of events, as the server judges them
const ranks = { bad: 3, warn: 2, quiet: 1 }

function eventState(w) {
  const [symbol, tone] = levels[w.kv_events_level] ?? levels.off
  return { text: `${symbol} ${w.never_heard ? 'never heard' : w.kv_events}`, value: w.kv_events, tone, title: w.kv_events_text }
}

function audit(w) {
  const a = w.audit
  if (!a) return {}
  const rules = { drop: 'It uses one block less than its events promise.', limit: `It uses ${percent(a.share ?? 0)} of what its events promise.` }
  const title = `${number(a.cached_tokens)} tokens were cached, ${number(a.predicted_tokens)} were predicted, in ${several(a.responses, 'response')}. ${rules[a.rule] ?? ''}`
  const rule = a.rule ? `, rule ${a.rule}${a.rule === 'limit' ? ` ${percent(a.share ?? 0)}` : ''}` : ''
  return { text: (a.departs ? '▲ departs' : `● ${number(a.responses)} checked`) + rule, value: a.responses, tone: a.departs ? 'bad' : a.rule ? 'warn' : 'good', title }
}

// model names the model, and says if its worker has groups of layers besides those with full attention.
function model(w) {
  const words = { known: ', hybrid', unknown: ', hybrid: unknown groups' }[w.hybrid] ?? ''
  const title = w.hybrid === 'unknown' ? 'kvroute does not know which prefixes its groups of layers can use: no prompt counts as cached there.' : ''
  return { text: w.model + words, value: w.model, title: title || w.model, tone: title ? 'warn' : '' }
}

const total = (w) => w.total_kv_blocks
const none = []

// Workers shows the workers of the feed. attention.of(w) has the items about a worker, shows(model, group) says what is
// selected, and changed is called when a filter or an order has changed.
export class Workers {
  constructor(attention, shows, changed) {
    Object.assign(this, { attention, shows, charts: {} })
    const points = (field) => (w) => this.charts[this.table.key(w)]?.[field] ?? none
    this.table = new Table(find('workers'), 'Workers, the worst first', [
      { name: 'Worker', field: 'name', show: (w) => plain(workerName(w, w.name), { title: `${workerName(w, w.name)}, ${w.address}, id ${w.worker_id}` }) },
      { name: 'Health', field: 'health', left: true, show: (w) => this.states.get(w), sort: (w) => ranks[this.states.get(w).tone] ?? 0 },
      { name: 'Failures', field: 'failures', show: (w) => count(w.failures, { tone: w.failures > 0 ? 'bad' : '' }) },
      { name: 'Active requests', field: 'active_requests', show: (w) => count(w.active_requests), points: points('active_requests') },
      { name: 'First token', field: 'ttft_ms', show: (w) => length(w.ttft_ms), points: points('ttft_ms') },
      {
        name: 'KV in use', field: 'active_blocks', points: points('kv_use'), sort: (w) => (total(w) ? w.active_blocks / total(w) : -1),
        show: (w) => count(w.active_blocks, total(w) ? { text: percent(w.active_blocks / total(w)), title: `${number(w.active_blocks)} of ${number(total(w))} blocks` } : { title: 'blocks' }),
      },
      { name: 'Pending tokens', field: 'pend_tokens', show: (w) => count(w.pend_tokens) },
      {
        name: 'Cached blocks', field: 'cached_blocks',
        show: (w) => count(w.cached_blocks, { share: total(w) && w.cached_blocks / total(w), title: total(w) ? `of ${number(total(w))}` : '' }),
      },
      { name: 'Predicted', field: 'guessed_blocks', spare: true, show: (w) => count(w.guessed_blocks, { title: 'blocks that are predicted without events' }) },
      { name: 'KV events', field: 'kv_events', left: true, show: eventState },
      { name: 'Routed', field: 'routed', show: (w) => count(w.routed) },
      { name: 'Audit', field: 'audit', left: true, spare: true, show: audit },
      { name: 'Model', field: 'model', left: true, show: model },
    ], (w) => `${w.worker_id}/${w.dp_rank}/${w.model}`)
    this.order = { column: this.table.columns[1], direction: -1, page: 0 }
    this.names = new Intl.Collator('en', { numeric: true })
    this.ranked = ''
    this.table.columns.forEach((column, i) => {
      const button = element('button', { type: 'button', className: 'sort' }, column.name)
      this.table.heads[i].replaceChildren(button)
      button.addEventListener('click', () => {
        const { order } = this
        order.direction = order.column === column ? -order.direction : column.sort || (!column.left && i > 0) ? -1 : 1 // figures: the largest first
        order.column = column
        changed()
      })
    })
    find('filter').addEventListener('input', () => {
      this.order.page = 0
      changed()
    })
    find('pager').addEventListener('click', (event) => {
      this.order.page += Number(event.target.value || 0)
      changed()
    })
  }

  // health is the health of a worker with the words of the items that need attention.
  health(w) {
    const [words, own] = healths[w.health] ?? [w.health, '']
    const items = this.attention.of(w)
    const whats = [...new Set([...items.map((i) => i.what), ...(w.faults ?? []).map((f) => f.what)])].filter((what) => what !== 'health')
    const title = items.map((i) => [i.text, i.advice].filter(Boolean).join('; ')).join('\n')
    const fault = own === 'bad' || items.some((i) => i.level === 'fault') || w.faults
    const tone = fault ? 'bad' : own === 'warn' || items.length || w.failing ? 'warn' : w.draining ? 'quiet' : own
    const symbol = { bad: '✕', warn: '▲', quiet: '◌' }[tone] ?? words.slice(0, 1)
    return { text: [`${symbol} ${words.slice(2)}`, w.draining && 'draining', ...whats].filter(Boolean).join(', '), value: w.health, tone, title: title || (w.draining ? 'It takes no new requests.' : '') }
  }

  sorted(list) {
    const all = list.map((w) => workerName(w, w.name))
    if (all.join() !== this.ranked) { // the place of each name is found again when the names change
      this.ranked = all.join()
      this.places = new Map(all.toSorted(this.names.compare).map((name, i) => [name, i]))
    }
    const { column, direction } = this.order
    const place = (w) => this.places.get(workerName(w, w.name))
    const key = column.sort ?? (column === this.table.columns[0] ? place : column.left ? (w) => column.show(w).text ?? '' : (w) => column.show(w).value ?? -1)
    return list
      .map((w) => ({ w, key: key(w), place: place(w) }))
      .sort((a, b) => direction * (typeof a.key === 'number' ? a.key - b.key : this.names.compare(a.key, b.key)) || a.place - b.place)
      .map((item) => item.w)
  }

  // filter shows only what matches a text.
  filter(text) {
    find('filter').value = text
    find('filter').dispatchEvent(new Event('input'))
  }

  // matches reports whether the texts that texts() returns match the filter.
  matches(texts) {
    const wanted = find('filter').value.trim().toLowerCase()
    return !wanted || texts().join('\n').toLowerCase().includes(wanted)
  }

  draw(all) {
    const { order, table } = this
    const list = all.filter((w) => this.shows(w.model, w.group ?? ''))
    this.states = new Map(list.map((w) => [w, this.health(w)]))
    const shown = this.sorted(list.filter((w) => this.matches(() => [workerName(w, w.name), w.model, this.states.get(w).text, eventState(w).text, w.group ?? ''])))
    const pages = Math.max(1, Math.ceil(shown.length / pageSize))
    order.page = Math.max(0, Math.min(order.page, pages - 1))
    const first = order.page * pageSize
    table.fill(shown.slice(first, first + pageSize), list.length ? 'No worker matches the filter.' : 'No worker is known yet. docs/workers.md describes how workers register.')
    table.columns.forEach((column, i) => {
      const direction = column === order.column ? (order.direction > 0 ? 'ascending' : 'descending') : null
      if (table.heads[i].ariaSort !== direction) table.heads[i].ariaSort = direction
    })
    find('pager').hidden = pages === 1
    put(find('page'), { text: `${first + 1} to ${Math.min(first + pageSize, shown.length)} of ${number(shown.length)}`, value: shown.length })
    const [previous, next] = find('pager').querySelectorAll('button')
    previous.disabled = order.page === 0
    next.disabled = order.page === pages - 1
    drawEvents(all)
    drawGroups(all.filter((w) => w.group))
  }
}

const eventTable = new Table(find('events'), 'Workers by event source and state', [
  { name: 'Source', field: 'transport', show: (g) => plain(g.transport) },
  { name: 'State', field: 'state', left: true, show: (g) => eventState(g.of) },
  { name: 'Workers', field: 'workers', show: (g) => count(g.workers) },
  { name: 'Cached blocks', field: 'cached_blocks', show: (g) => count(g.blocks) },
], (g) => `${g.transport}/${g.of.kv_events}/${g.of.never_heard ?? false}/${g.of.kv_events_level}`)

function drawEvents(list) {
  const kinds = new Map()
  for (const w of list) {
    const transport = w.group ? 'group summaries' : w.event_transport || 'not registered'
    const key = `${transport}/${w.kv_events}/${w.never_heard}/${w.kv_events_level}`
    const kind = kinds.get(key) ?? { transport, of: w, workers: 0, blocks: 0 }
    kind.workers++
    kind.blocks += w.cached_blocks
    kinds.set(key, kind)
  }
  eventTable.fill([...kinds.keys()].sort().map((key) => kinds.get(key)), 'No worker is known yet.')
}

const left = new Table(find('left'), 'Workers that left within the last hour, newest first', [
  { name: 'Worker', field: 'name', show: (l) => plain(workerName(l, l.name), { title: `${workerName(l, l.name)}, id ${l.worker_id}` }) },
  { name: 'State', field: 'state', left: true, show: (l) => ({ text: healths[l.state]?.[0] ?? l.state, value: l.state, tone: healths[l.state]?.[1] ?? '', title: l.text }) },
  { name: 'When and why', field: 'text', left: true, wrap: true, show: (l) => plain(l.text) },
  { name: 'Requests failed', field: 'requests_failed', show: (l) => count(l.requests_failed, { tone: l.requests_failed > 0 ? 'bad' : '', title: 'requests that failed at this worker; other workers may have served them' }) },
  { name: 'Before', field: 'last_state', left: true, show: (l) => plain(l.last_state) },
  { name: 'Model', field: 'model', left: true, show: (l) => plain(l.models[0], { title: l.models.join(', ') }) },
  { name: 'Address', field: 'address', left: true, show: (l) => plain(l.address) },
], (l) => `${l.worker_id}/${l.left_at}`)

// drawLeft shows the newest departed workers that match(texts).
export function drawLeft(list, matches) {
  find('left-section').hidden = list.length === 0
  left.fill(list.filter((l) => matches(() => [workerName(l, l.name), l.state, ...l.models])).slice(0, pageSize), 'No departed worker matches the filter.')
}

const groups = new Table(find('groups'), 'Router groups', [
  { name: 'Group', field: 'group', show: (w) => plain(w.group) },
  { name: 'Members', field: 'members', show: (w) => count(w.summary?.members) },
  { name: 'Busy', field: 'busy', show: (w) => count(w.summary?.busy) },
  { name: 'Queued', field: 'queued', show: (w) => count(w.summary?.queued) },
  { name: 'Summary', field: 'age_ns', left: true, show: (w) => (!w.summary ? {} : { text: w.summary.stale ? '▲ stale' : '● recent', value: w.summary.age_ns, tone: w.summary.stale ? 'warn' : 'good' }) },
], (w) => w.group)

function drawGroups(list) {
  find('groups-section').hidden = list.length === 0
  groups.fill(list)
}
