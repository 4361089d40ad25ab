import sys,time,json
from agentrl.repos import build, root, run
from agentrl.repos.lock import lock_of
from agentrl import sandboxes
from agentrl.sandboxes.pool import Pool
lock=lock_of(sys.argv[1],tuple(),print)
built=root.ready(lock)
with Pool(sandboxes.load('namespace')(),limit=4) as pool:
    b=build.Builder(built,pool,build.Options(workers=1),print)
    mods=built.source.test_modules()
    for m in mods:
        t=time.monotonic()
        r=run.run(built,pool,b.files,[m],trace=True,seconds=60)
        print(m,round(time.monotonic()-t,1),len(r.tests),'ended',r.ended,r.stuck, r.errors, r.said[-500:], [ (n,round(x.seconds,1)) for n,x in r.tests.items() if x.seconds>1],[ (n,x.phases,x.message[:150]) for n,x in r.tests.items() if not x.passed][:3],flush=True)
