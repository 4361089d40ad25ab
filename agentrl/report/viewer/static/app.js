// The page: addresses, keys, live updates.
'use strict'

const KEYS = [['/', 'search the transcripts'], ['j  k', 'next, previous row or rollout'], ['Enter', 'open the row'], ['[  ]', 'previous, next page'], ['t', 'turns or tokens'], ['← →', 'move through tokens or rollouts'], ['g', 'the whole group'], ['o', 'the run\'s overview'], ['b', 'browse its trajectories'], ['r', 'all runs'], ['d', 'dark or light'], ['?', 'this list']]
const address = () => {
  const [path, query] = (location.hash ? location.hash.slice(2) : EMBEDDED ? EMBEDDED.start : '').split('?')
  const safe = part => { try { return decodeURIComponent(part) } catch { return part } }
  return { path: path.split('/').map(safe), query: Object.fromEntries(new URLSearchParams(query || '')) }
}
const stored = { get(name) { try { return localStorage.getItem(name) } catch { return null } }, set(name, value) { try { localStorage.setItem(name, value) } catch { /* private */ } } }
function turn() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches
  document.documentElement.dataset.theme = dark ? 'light' : 'dark'
  stored.set('theme', document.documentElement.dataset.theme)
  theme.changed()
}
if (stored.get('theme')) document.documentElement.dataset.theme = stored.get('theme')

const go = { keys: {}, tokens: {}, refresh: () => {} }
function App() {
  const [at, setAt] = useState(address()), [beat, setBeat] = useState(0), [live, setLive] = useState(''), [listed, setListed] = useState({ runs: [] })
  const help = useRef(null)
  go.refresh = () => setBeat(n => n + 1)
  useEffect(() => {
    const moved = () => { go.keys = {}; setAt(address()); scrollTo(0, 0) }
    addEventListener('hashchange', moved)
    return () => removeEventListener('hashchange', moved)
  }, [])
  useEffect(() => { get(['runs']).then(setListed, () => {}) }, [beat])
  const [kind, run, view, key] = at.path
  const name = kind === 'run' ? run : ''
  useEffect(() => {
    if (EMBEDDED) return
    if (!name) { const timer = setInterval(() => setBeat(n => n + 1), 5000); return () => clearInterval(timer) }
    const source = new EventSource(`api/run/${encodeURIComponent(name)}/events`)
    let timer = null
    source.onopen = () => setLive('on')
    source.onerror = () => setLive('lost')
    // The first message counts too: the run may have gone on between what the page asked for and this line's opening.
    source.onmessage = () => { if (!timer) timer = setTimeout(() => { timer = null; setBeat(n => n + 1) }, 300) }
    return () => { source.close(); clearTimeout(timer); setLive('') }
  }, [name])
  useEffect(() => {
    const pressed = e => {
      if (e.ctrlKey || e.metaKey || e.altKey) return
      if (e.key === 'Escape') { document.activeElement.blur(); return }
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) || (e.key === 'Enter' && /^(A|BUTTON|SUMMARY)$/.test(e.target.tagName))) return
      const common = { '?': () => help.current.showModal(), r: () => { location.hash = '/' }, d: turn, ...(name ? { o: () => { location.hash = link(['run', name]).slice(1) }, b: () => { location.hash = link(['run', name, 'rows']).slice(1) } } : {}) }
      const action = go.keys[e.key] || common[e.key]
      if (action) { e.preventDefault(); action() }
    }
    addEventListener('keydown', pressed)
    return () => removeEventListener('keydown', pressed)
  }, [name])
  useEffect(() => { document.title = [kind === 'compare' ? `${at.path[1]} against ${at.path[2]}` : name, view, 'agentrl'].filter(Boolean).join(' · ') }, [at])
  const props = { run, beat, query: at.query, go, trajectory: key, key: at.path.join('/') }
  const page = !kind ? html`<${RunsView} beat=${beat} />`
    : kind === 'compare' ? html`<${CompareView} a=${at.path[1]} b=${at.path[2]} query=${at.query} beat=${0} />`
      : kind === 'redteam' ? html`<${RedTeamView} />`
        : kind === 'run' && view === 'rows' ? html`<${RowsView} ...${props} />`
          : kind === 'run' && view === 'one' ? html`<${OneView} ...${props} />`
            : kind === 'run' && view === 'group' ? html`<${GroupView} ...${props} />`
              : kind === 'run' ? html`<${RunView} ...${props} />` : html`<p class="empty">There is no such page. <a href="#/">All runs</a></p>`
  const current = part => part ? 'page' : null
  return html`<header class="top"><a class="brand" href="#/">agentrl</a><nav aria-label="views"><a href="#/" aria-current=${current(!kind)}>Runs</a>
    ${name ? html`<a href=${link(['run', name])} aria-current=${current(!view)}>${name}</a><a href=${link(['run', name, 'rows'])} aria-current=${current(view)}>Trajectories</a>` : ''}
    ${kind === 'compare' ? html`<a aria-current="page" href=${link(['compare', at.path[1], at.path[2]])}>Compare</a>` : ''}
    ${listed.redteam ? html`<a href="#/redteam" aria-current=${current(kind === 'redteam')}>Red team</a>` : ''}</nav>
    <span class="right">${EMBEDDED ? html`<small>${EMBEDDED.made || ''}</small>` : name ? html`<span class=${`live ${live === 'on' ? 'on' : ''}`}><i></i>${live === 'on' ? 'live' : live === 'lost' ? 'connection lost' : ''}</span>` : ''}<button aria-label="dark or light" title="dark or light (d)" onClick=${turn}>◐</button><button aria-label="keys" title="keys (?)" onClick=${() => help.current.showModal()}>?</button></span></header>
  <main>${page}</main>
  <dialog ref=${help} onClick=${e => e.target === help.current && help.current.close()}><h2>Keys</h2><dl>${KEYS.map(([k, what]) => html`<dt key=${k}><kbd>${k}</kbd></dt><dd>${what}</dd>`)}</dl><p><button onClick=${() => help.current.close()}>close</button></p></dialog>`
}
const root = document.getElementById('app')
root.textContent = ''
render(html`<${App} />`, root)
