"""Programs that try to get out of the sandbox, or to take more than their share of the machine.

    pytest tests/environments/sandbox/test_attacks.py            # the attack suite, against every mechanism of this machine

Whether one got through is judged from outside: by a secret that it prints, a file, process or socket that it touched.
A program that can only tell of its success prints BREACH. The last tests run the harmless ones without a sandbox, to
show that they are real.
"""

# ruff: noqa: E501 (a program is one line)

import contextlib
import dataclasses
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import tempfile
import textwrap

import pytest

from sdpo_jax.config import SandboxConfig
from sdpo_jax.environments.sandbox import bubblewrap, confinement
from sdpo_jax.environments.sandbox import sandbox as implementation
from sdpo_jax.environments.sandbox.sandbox import Limits, Sandbox, SandboxJob
from sdpo_jax.errors import UserError

HARNESS = pathlib.Path(__file__).with_name('sandbox_harness.py')
SECRET = 'a-secret-of-the-owner-73316'
LIMITS = Limits(wall_s=3, cpu_s=1, memory_mb=512, file_mb=4, output_mb=1)
COLUMN = {'x86_64': 0, 'aarch64': 1}.get(platform.machine(), 0)


@dataclasses.dataclass
class World:
  """What is outside of the sandbox, for programs to find."""

  directory: pathlib.Path  # Anybody may read and write it and all below.
  canary: pathlib.Path  # A file with the secret.
  server: socket.socket
  datagrams: socket.socket
  abstract: socket.socket
  marker: subprocess.Popen  # A process with the secret in its environment.

  def given(self):
    """Return what programs are told of it."""
    return {
      'directory': str(self.directory),
      'canary': str(self.canary),
      'port': self.server.getsockname()[1],
      'udp_port': self.datagrams.getsockname()[1],
      'abstract': self.abstract.getsockname().decode(),
      'marker': self.marker.pid,
      'owner': os.getpid(),
      'repository': __file__,
      'column': COLUMN,
    }

  def breaches(self, report):
    """Return what a program with this report did to the world."""
    found = []
    said = f'{report.stdout}{report.stderr}{report.result}'
    for sign in (SECRET, 'BREACH', 'root:x:0:0', __doc__[:40]):
      if sign in said:
        found.append(f'printed {sign!r}')
    if sorted(os.listdir(self.directory)) != ['canary', 'socket']:
      found.append(f'directory holds {os.listdir(self.directory)}')
    elif self.canary.read_text() != SECRET:
      found.append('canary changed')
    elif self.canary.stat().st_mode & 0o777 != 0o666 or self.canary.stat().st_mtime != 1e9:
      found.append('mode or time changed')
    for listening in (self.server, self.abstract):
      if accepted(listening):
        found.append('connection')
    try:
      found.append(f'datagram {self.datagrams.recv(99)!r}')
    except BlockingIOError:
      pass
    if self.marker.poll() is not None:
      found.append(f'marker ended with {self.marker.returncode}')
    elif os.getpriority(os.PRIO_PROCESS, self.marker.pid) != os.getpriority(os.PRIO_PROCESS, 0):
      found.append('priority of the marker changed')
    elif pathlib.Path(f'/proc/{self.marker.pid}/status').read_text().split('TracerPid:')[1].split()[0] != '0':
      found.append('marker is traced')
    return found


def accepted(listening):
  try:
    listening.accept()[0].close()
  except BlockingIOError:
    return False
  return True


@pytest.fixture
def world(monkeypatch):
  monkeypatch.setenv('OWNERS_SECRET', SECRET)
  directory = pathlib.Path(tempfile.mkdtemp(prefix='world-'))
  directory.chmod(0o777)
  canary = directory / 'canary'
  canary.write_text(SECRET)
  canary.chmod(0o666)
  os.utime(canary, (1e9, 1e9))
  abstract = socket.socket(socket.AF_UNIX)
  abstract.bind(f'\0{directory}'.encode())
  named = socket.socket(socket.AF_UNIX)
  named.bind(str(directory / 'socket'))
  named.listen()
  os.chmod(directory / 'socket', 0o777)
  datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
  datagrams.bind(('127.0.0.1', 0))
  server = socket.create_server(('127.0.0.1', 0))
  for each in (abstract, datagrams, server):
    each.setblocking(False)
  abstract.listen()
  marker = subprocess.Popen(['sleep', '1000'], env={'SECRET': SECRET, 'PATH': os.environ['PATH']})
  yield World(directory, canary, server, datagrams, abstract, marker)
  marker.kill()
  marker.wait()
  for each in (abstract, named, datagrams, server):
    each.close()
  shutil.rmtree(directory)


def older_landlock(directory, version):
  """Return a copy of the sandbox's files that knows only a version of Landlock, 0 for none; Linux 5.13 has the
  first.
  """
  for path in implementation.HERE.glob('*.py'):
    shutil.copy(path, directory)
  body = f'return {version}' if version else 'raise Unsupported("the kernel has no Landlock")'
  with open(directory / 'confinement.py', 'a') as file:
    file.write(f'\n\ndef landlock_version():\n  {body}\n')
  return directory


@contextlib.contextmanager
def made(mechanism, view, version, directory):
  """Yield a sandbox of this kind; skips where there can be none."""
  try:
    newest = confinement.landlock_version()
  except confinement.Unsupported:
    newest = 0
  if (version or 1) > newest and version != 0:
    pytest.skip(f'the kernel has Landlock {newest}')
  with pytest.MonkeyPatch.context() as patch:
    if version is not None:
      patch.setattr(implementation, 'HERE', older_landlock(directory, version))
    patch.setattr(implementation, 'ATTEMPTS', ((mechanism, view),))
    try:
      value = Sandbox(SandboxConfig(workers=2), HARNESS, preload=('json',))
    except UserError as error:
      if not any(missing in str(error) for missing in ('not allowed here', 'bwrap is not installed', 'bwrap: ')):
        raise
      pytest.skip(str(error))
  with value:
    yield value


# The mechanism, whether programs have views of their own, and the version of Landlock: None for the kernel's, 0 for
# none.
KINDS = {
  'landlock': ('landlock', True, None),
  'landlock 1, shared': ('landlock', False, 1),
  'bubblewrap, no Landlock': ('bubblewrap', True, 0),
  'landlock, shared': ('landlock', False, None),
  'bubblewrap, shared, no Landlock': ('bubblewrap', False, 0),
}


@pytest.fixture(scope='module')
def sandbox(request, tmp_path_factory):
  with made(*KINDS[request.param], tmp_path_factory.mktemp('older')) as value:
    yield value


@pytest.fixture(scope='module', params=range(2, 10))
def sandbox_of_version(request, tmp_path_factory):
  with made('landlock', False, request.param, tmp_path_factory.mktemp('older')) as value:
    yield value


@pytest.fixture(scope='module')
def no_sandbox():
  def nothing():
    raise confinement.Unsupported('this test wants none')

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bubblewrap, 'find', nothing)
    settings = SandboxConfig(mechanism='bubblewrap', allow_unsandboxed=True, workers=2)
    with Sandbox(settings, HARNESS) as value:
      assert value.mechanism == 'none'
      yield value


PRELUDE = """
import ctypes, os, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(x86_64, aarch64, *arguments):
  return libc.syscall(ctypes.c_long((x86_64, aarch64)[column]), *(ctypes.c_long(a) for a in arguments))
def attempt(action):
  try:
    return action()
  except Exception as error:
    print(type(error).__name__)
libc.mmap.restype = ctypes.c_long
def map_file(file):  # The module mmap would keep the descriptor.
  if libc.mmap(None, ctypes.c_size_t(1), 1, 1, file.fileno(), ctypes.c_long(0)) == -1: raise OSError("none left")
def in_child(action):
  pid = os.fork()
  if pid == 0:
    try:
      action()
    finally:
      os._exit(0)
  os.waitpid(pid, 0)
"""

# By name: a program, which sees what `World.given` says.
ATTACKS = {
  # Files.
  'read a file': 'print(open(canary).read())',
  'read the users': 'print(open("/etc/passwd").read())',
  'read the repository': 'print(open(repository).read())',
  'read through a symbolic link': 'attempt(lambda: os.symlink(canary, "link")); print(open("link").read())',
  'read through a hard link': 'attempt(lambda: os.link(canary, "link")); print(open("link").read())',
  'read through a renamed file': 'attempt(lambda: os.rename(canary, "here")); print(open("here").read())',
  'read a file from its directory': 'os.chdir(directory); print(open("canary").read())',
  'read up from the scratch directory': 'print(open("../" * 40 + canary).read())',
  'read through the root of another process': 'print(open(f"/proc/{owner}/root{canary}").read())',
  'read from an opened path': """
    fd = os.open(canary, os.O_PATH)
    print(open(f"/proc/self/fd/{fd}").read())""",
  'open by handle': """
    handle, mount = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136), ctypes.c_int()
    libc.name_to_handle_at(-100, canary.encode(), handle, ctypes.byref(mount), 0)
    fd = libc.open_by_handle_at(os.open(directory, os.O_RDONLY), handle, os.O_RDONLY)
    print(os.read(fd, 99))""",
  'copy with another call': """
    how = ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, 0), 24)
    name = ctypes.create_string_buffer(canary.encode())
    fd = call(437, 437, -100, ctypes.addressof(name), ctypes.addressof(how), 24)
    print(os.read(fd, 99))""",
  'map a file': 'import mmap; print(mmap.mmap(os.open(canary, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:])',
  'list a directory': 'if "canary" in os.listdir(directory): print("BREACH")',
  'list the scratch directories': 'os.listdir(".."); print("BREACH")',
  'write beside the scratch directory': 'open("../mine", "w"); print("BREACH")',
  'list the root': 'if "proc" in os.listdir("/"): print("BREACH")',
  'watch a directory': 'if libc.inotify_add_watch(libc.inotify_init(), directory.encode(), 0xFFF) >= 0: print("BREACH")',
  'write a file': 'open(canary, "w").write("x")',
  'append to a file': 'open(canary, "a").write("x")',
  'change Python': 'open(os.__file__, "a"); print("BREACH")',
  'make a file': 'open(directory + "/new", "w").write("x")',
  'make a directory': 'os.mkdir(directory + "/new")',
  'make a link': 'os.symlink("/", directory + "/new")',
  'make a pipe': 'os.mkfifo(directory + "/new")',
  'remove a file': 'os.unlink(canary)',
  'rename a file': 'os.rename(canary, directory + "/new")',
  'replace a file': 'open("mine", "w").write("x"); os.replace("mine", canary)',
  'move a file out': 'open("mine", "w").write("x"); os.rename("mine", directory + "/new")',
  'link a file out': 'open("mine", "w").write("x"); os.link("mine", directory + "/new")',
  'truncate a file': 'os.truncate(canary, 0)',
  'truncate a file by reading it': 'os.open(canary, os.O_RDONLY | os.O_TRUNC)',
  'change a mode': 'os.chmod(canary, 0o777)',
  'change a time': 'os.utime(canary, (0, 0))',
  'change an attribute': 'os.setxattr(canary, "user.x", b"x"); print("BREACH")',
  'make a program that runs as its owner': 'open("mine", "w"); os.chmod("mine", 0o4755); print("BREACH")',
  # Other processes.
  'read an environment': 'print(open(f"/proc/{marker}/environ").read())',
  "read the owner's environment": 'print("BREACH" if open(f"/proc/{owner}/environ").read() else "")',
  "read the zygote's environment": 'print("BREACH" if open(f"/proc/{os.getppid()}/environ").read() else "")',
  'read its own environment': 'print(os.environ, attempt(lambda: open("/proc/self/environ").read()))',
  "read the owner's command line": 'print("BREACH" if open(f"/proc/{owner}/cmdline").read() else "")',
  "read the owner's memory": 'open(f"/proc/{owner}/mem", "rb"); print("BREACH")',
  "read the zygote's memory": 'open(f"/proc/{os.getppid()}/mem", "rb"); print("BREACH")',
  'list the processes': 'if len(os.listdir("/proc")) > 3: print("BREACH")',
  "list the owner's descriptors": 'os.listdir(f"/proc/{owner}/fd"); print("BREACH")',
  'signal a process': 'os.kill(marker, signal.SIGKILL)',
  'signal a thread': 'call(200, 130, marker, signal.SIGKILL); call(234, 131, marker, marker, signal.SIGKILL)',
  'queue a signal': """
    info = ctypes.create_string_buffer(struct.pack("iii", 0, 0, -1), 128)
    call(129, 138, marker, 9, ctypes.addressof(info)); time.sleep(0.2)""",
  'signal through a process descriptor': """
    fd = call(434, 434, marker, 0)
    call(424, 424, fd, 9, 0, 0); time.sleep(0.2)""",
  'signal by input': """
    import fcntl
    r, w = os.pipe()
    attempt(lambda: fcntl.fcntl(r, fcntl.F_SETOWN, marker))
    attempt(lambda: fcntl.fcntl(r, 10, signal.SIGKILL))
    attempt(lambda: fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC))
    os.write(w, b"x"); time.sleep(0.2)""",
  'trace a process': 'print("BREACH" if libc.ptrace(0x4206, marker, None, None) == 0 else "")',
  'read the memory of a process': """
    import ctypes
    class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(8)
    ours = Part(ctypes.addressof(buffer), 8)
    print("BREACH" if libc.process_vm_readv(os.getppid(), ctypes.byref(ours), 1, ctypes.byref(ours), 1, 0) >= 0 else "")""",
  'speak by locks': """
import fcntl
file = os.open(os.__file__, os.O_RDONLY)
for lock in (lambda: fcntl.flock(file, fcntl.LOCK_SH), lambda: fcntl.lockf(file, fcntl.LOCK_SH)):
  lock(); print('BREACH')
""",
  'slow a process': 'os.setpriority(os.PRIO_PROCESS, marker, 15)',
  'pin a process': 'os.sched_setaffinity(marker, os.sched_getaffinity(0)); print("BREACH")',
  "read a process's clock": 'time.clock_gettime((~marker << 3) | 2); print("BREACH")',
  'limit a process': 'import resource; resource.prlimit(marker, resource.RLIMIT_CORE, (0, 0)); print("BREACH")',
  # More processes.
  'fork': 'in_child(lambda: os.write(1, b"BREACH"))',
  'fork by a plain call': """
    pid = call(57, 220, 17, 0, 0, 0, 0)
    if pid == 0: os.write(1, b"BREACH"); os._exit(0)""",
  'clone in new namespaces': """
    pid = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0: os.write(1, b"BREACH"); os._exit(0)""",
  'clone by the newer call': """
    arguments = ctypes.create_string_buffer(struct.pack("11Q", 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)
    pid = call(435, 435, ctypes.addressof(arguments), 88)
    if pid == 0: os.write(1, b"BREACH"); os._exit(0)""",
  'spawn a shell': 'print(subprocess.run("echo BREACH", shell=True, capture_output=True).stdout)',
  'become another program': 'os.execv("/bin/echo", ["echo", "BREACH"])',
  'become a program of its own': """
    with open("mine", "w") as file: file.write("#!/bin/sh\\necho BREACH")
    attempt(lambda: os.chmod("mine", 0o755))
    os.execv("./mine", ["mine"])""",
  'become a program in memory': """
    fd = os.memfd_create("mine")
    os.write(fd, open("/bin/echo", "rb").read())
    os.execve(fd, ["echo", "BREACH"], {})""",
  'start many processes': """
    for _ in range(50):
      in_child(lambda: time.sleep(0))
      print("BREACH")""",
  'survive': """
    def daemon():
      os.setsid()
      if os.fork() == 0:
        time.sleep(0.3)
        open(canary, "w").write("daemon")
    in_child(daemon); time.sleep(0.6)""",
  'start a session': 'os.setsid(); print("BREACH")',
  'leave its process group': 'os.setpgid(0, 0); print("BREACH")',
  'become a daemon of the system': 'if libc.prctl(36, 1, 0, 0, 0) == 0: print("BREACH")',
  'outlive its parent': 'if libc.prctl(1, 0, 0, 0, 0) == 0: print("BREACH")',
  # Network.
  'connect': 'socket.create_connection(("127.0.0.1", port), 1)',
  'send a datagram': 'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", udp_port))',
  'connect to an abstract socket': 'socket.socket(socket.AF_UNIX).connect(abstract)',
  'connect to a socket by name': 'socket.socket(socket.AF_UNIX).connect(directory + "/socket"); print("BREACH")',
  'listen': 'socket.create_server(("127.0.0.1", 0)); print("BREACH")',
  'ask for a name': 'socket.getaddrinfo("localhost", 80); print("BREACH")',
  'a pair of sockets': 'socket.socketpair(); print("BREACH")',
  'raw packets': 'socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print("BREACH")',
  'talk to the kernel': 'socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print("BREACH")',
  # The kernel: what a program has no use for. `call` takes the number on x86_64 and on aarch64.
  'io_uring': 'print("BREACH" if call(425, 425, 1, ctypes.addressof(ctypes.create_string_buffer(120))) >= 0 else "")',
  'a key': 'print("BREACH" if call(250, 219, 0, -3, 1) >= 0 else "")',
  'namespaces': 'print("BREACH" if libc.unshare(0x10000000) == 0 else "")',
  'a mount': 'libc.unshare(0x20000); print("BREACH" if libc.mount(b"n", b"/mnt", b"tmpfs", 0, b"") == 0 else "")',
  'a memory file': 'os.memfd_create("x"); print("BREACH")',
  'page faults': 'print("BREACH" if call(323, 282, 1) >= 0 else "")',
  'performance counters': """
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 112, 0), 112)
    print("BREACH" if call(298, 241, ctypes.addressof(attributes), 0, -1, -1, 0) >= 0 else "")""",
  'bpf': """
    attributes = ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 8, 1), 72)
    print("BREACH" if call(321, 280, 0, ctypes.addressof(attributes), 72) >= 0 else "")""",
  'another personality': 'print("BREACH" if libc.personality(0x0040000) != -1 else "")',
  'shared memory': 'print("BREACH" if libc.shmget(0x73316, 4096, 0o1600) != -1 else "")',
  'a message queue': 'print("BREACH" if libc.msgget(0x73316, 0o1600) != -1 else "")',
  'another host name': 'print("BREACH" if libc.sethostname(socket.gethostname().encode(), len(socket.gethostname())) == 0 else "")',
  'another root': 'os.chroot("."); print("BREACH")',
  'another user': 'os.setresuid(0, 0, 0); print("BREACH")',
  'terminal input': 'import fcntl; fcntl.ioctl(0, 0x5412, b"x"); print("BREACH")',
  'larger limits': """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); print("BREACH")""",
  'calls of another machine': """
    import mmap
    if column: raise SystemExit
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("53b814000000cd805bc3"))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    print("BREACH" if function() > 0 else "")""",
  'calls of a narrower machine': 'print("BREACH" if not column and call(0x40000000 + 39, 0) > 0 else "")',
  # Descriptors and what is in its own memory.
  'descriptors of others': """
    for fd in range(5, 4096):
      if attempt_quietly(fd): print("BREACH", fd)""".replace('attempt_quietly(fd)', 'libc.fcntl(fd, 1) != -1'),
  'the socket of the zygote': """
    for fd in range(3, 4096):
      try: socket.socket(fileno=os.dup(fd)).send(b"x")
      except OSError: continue
      print("BREACH")""",
  "secrets in Python's memory": """
    import gc
    for value in gc.get_objects():
      if isinstance(value, dict) and any(isinstance(v, str) and "another-payload-9" + "73" in v for v in list(value.values())):
        print("BREACH")""",
  # More than its share.
  'memory': """
    held = []
    while len(held) < 40: held.append(bytearray(64 << 20))
    print("BREACH")""",
  'memory that is shared': """
    import mmap
    held = [mmap.mmap(-1, 64 << 20) for _ in range(40)]
    print("BREACH")""",
  'a large file': """
    with open("mine", "wb") as file:
      for _ in range(64): file.write(bytes(1 << 20))
    print("BREACH")""",
  'many large files': """
    for index in range(2000):
      with open(f"{index}", "wb") as file: file.write(bytes(1 << 20))
    print("BREACH")""",
  'files without a name': """
    held = []
    for index in range(2000):
      file = open("mine", "wb", 0); os.unlink("mine"); held.append(file)
      for _ in range(4): file.write(bytes(1 << 20)); time.sleep(0.02)
    print("BREACH")""",
  'files that never had a name': """
    for index in range(60): os.write(os.open(".", os.O_TMPFILE | os.O_RDWR), bytes(1 << 20))
    print("BREACH")""",
  'files in a closed directory': """
    os.mkdir("closed", 0o300)
    for index in range(2000):
      with open(f"closed/{index}", "wb") as file: file.write(bytes(1 << 18)); time.sleep(0.001)
    print("BREACH")""",
  'many files': """
    for index in range(400_000): open(f"{index}", "w").close()
    print("BREACH")""",
  'files that are only mapped': """
    for index in range(24):
      with open("mine", "w+b", 0) as file:
        os.unlink("mine")
        file.write(bytes(4 << 20))
        map_file(file)
      time.sleep(0.05)
    print("BREACH")""",
  'files of a thread whose parent has ended': """
    def hold():
      held = []
      for index in range(24):
        file = open("mine", "wb", 0); os.unlink("mine"); held.append(file)
        file.write(bytes(4 << 20))
        time.sleep(0.05)
      os.write(1, b"BREACH")
    threading.Thread(target=hold).start()
    call(60, 93, 0)""",
  'many files without a name': """
    for index in range(20_000):
      file = os.open("mine", os.O_RDWR | os.O_CREAT)
      os.unlink("mine"); os.write(file, b"x")
      if libc.mmap(None, ctypes.c_size_t(1), 1, 1, file, ctypes.c_long(0)) == -1: raise OSError("none left")
      os.close(file)
    print("BREACH")""",
  'descriptors of a single thread': """
    if libc.unshare(0x400) == 0 or call(436, 436, 3, 9, 2) == 0: print("BREACH")""",
  'deep directories': """
    for index in range(100_000): os.mkdir("d"); os.chdir("d")
    print("BREACH")""",
  'allocated blocks': """
    for index in range(100): os.posix_fallocate(os.open(f"{index}", os.O_CREAT | os.O_RDWR), 0, 1 << 28)
    print("BREACH")""",
  'threads': """
    threading.stack_size(65536)
    for index in range(20_000): threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    print("BREACH")""",
  'descriptors': 'held = [os.pipe() for _ in range(5000)]; print("BREACH")',
  'output without end': 'while True: os.write(1, b"x" * 65536)',
  'errors without end': 'while True: os.write(2, b"x" * 65536)',
  'a result without end': 'while True: os.write(4, b"x" * 65536)',
  'time': 'time.sleep(30); print("BREACH")',
  'time of the processor': """
    for number in range(1, 65): attempt(lambda: signal.signal(number, signal.SIG_IGN))
    while time.process_time() < 20: pass
    print("BREACH")""",
  'time of a thread that nothing ends': """
    threading.Thread(target=time.sleep, args=(30,)).start()""",
}
# How programs end that would not by themselves.
ENDS = {
  **dict.fromkeys(['output without end', 'errors without end', 'a result without end'], 'output'),
  **dict.fromkeys(['time', 'time of the processor', 'time of a thread that nothing ends'], 'timeout'),
}
# Not to be tried without a sandbox: what uses up a machine, or harms those beside.
HARMFUL = {
  *('another root', 'another user', 'another host name', 'a mount', 'become a daemon of the system'),
  *('many large files', 'files without a name', 'files that never had a name', 'files in a closed directory'),
  *('files that are only mapped', 'files of a thread whose parent has ended', 'many files without a name'),
  *('many files', 'deep directories', 'allocated blocks', 'threads', 'the socket of the zygote', 'raw packets'),
  *('output without end', 'errors without end', 'a result without end', 'time', 'time of the processor'),
  *('time of a thread that nothing ends', 'terminal input', 'a key', 'namespaces', 'a message queue', 'shared memory'),
}


def attack(sandbox, world, name):
  code = f'{PRELUDE}\n{textwrap.dedent(ATTACKS[name])}'
  return sandbox.run([SandboxJob({'code': code, 'given': world.given()}, '', LIMITS)])[0]


# What asks for more than its share meets the same limits of resources in every kind, and takes seconds: the first kind
# is enough by default.
GREEDY = tuple(ATTACKS)[tuple(ATTACKS).index('memory') :]


def kinds(*quick):
  """Return a decorator that runs a test in every kind of sandbox; those not in `quick` are slow."""
  cases = [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]
  return pytest.mark.parametrize('sandbox', cases, indirect=True, scope='module')


def check_contained(sandbox, world, name):
  report = attack(sandbox, world, name)
  assert world.breaches(report) == [], report
  assert len(report.stdout) + len(report.stderr) <= LIMITS.output_mb * 2**20
  assert report.cpu_s < LIMITS.cpu_s + 3 and report.status == ENDS.get(name, report.status), report
  alive = sandbox.run([SandboxJob({'code': 'result = 7'}, '', LIMITS)])[0]
  assert alive.result == 7, 'the sandbox is there for the next program'


@pytest.mark.parametrize('name', [name for name in ATTACKS if name not in GREEDY])
@kinds('landlock', 'landlock 1, shared', 'bubblewrap, no Landlock')
def test_an_attack_is_contained(sandbox, world, name):
  check_contained(sandbox, world, name)


@pytest.mark.parametrize('name', GREEDY)
@kinds('landlock')
def test_what_asks_for_more_than_its_share_is_contained(sandbox, world, name):
  check_contained(sandbox, world, name)


# What one of Landlock's versions after the first knows more rights for.
VERSIONED = (
  *('read a file', 'write a file', 'make a file', 'truncate a file', 'truncate a file by reading it', 'rename a file'),
  *('move a file out', 'link a file out', 'connect', 'connect to an abstract socket', 'signal a process'),
  *('terminal input', 'change Python', 'list the root'),
)


@pytest.mark.parametrize('name', VERSIONED)
def test_an_attack_is_contained_by_every_version_of_landlock(sandbox_of_version, world, name):
  report = attack(sandbox_of_version, world, name)
  assert world.breaches(report) == [], report


@pytest.mark.parametrize('name', sorted(set(ATTACKS) - HARMFUL))
def test_without_a_sandbox_attacks_succeed(no_sandbox, world, name, record):
  record[name] = bool(world.breaches(attack(no_sandbox, world, name)))


@pytest.fixture(scope='module')
def record():
  succeeded = {}
  yield succeeded
  if len(succeeded) > 10:
    assert sum(succeeded.values()) > len(succeeded) / 2, f'these fail without a sandbox too: {succeeded}'
