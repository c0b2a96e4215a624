// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// pythonTools returns the Python of tools/python.sh, which installs it once.
func pythonTools(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("installs Python packages")
	}
	cmd := exec.CommandContext(t.Context(), "../../tools/python.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// script runs a program and returns its output. Variables replace those of the environment.
func script(t *testing.T, variables []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = append(append(os.Environ(), "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_NO_INDEX=1"), variables...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// The package installs in clean environments without a network: without Go the client alone, with Go also the publisher
// and its library. Both work there, and users get types and docstrings.
func TestPythonWheels(t *testing.T) {
	t.Parallel() // mostly waits
	tools := pythonTools(t)
	home := filepath.Dir(filepath.Dir(tools))
	find := "--find-links=" + filepath.Join(home, "wheels")
	clean := func(name string) (python string) {
		t.Helper()
		dir := filepath.Join(t.TempDir(), name)
		script(t, nil, tools, "-m", "venv", "--without-pip", dir)
		return filepath.Join(dir, "bin", "python")
	}
	source := func() string { // pip writes into the folder of the sources
		t.Helper()
		dir := filepath.Join(t.TempDir(), "kvroute")
		if err := os.CopyFS(filepath.Join(dir, "bindings", "python"), os.DirFS("../../bindings/python")); err != nil {
			t.Fatal(err)
		}
		return dir
	}

	file := filepath.Join(t.TempDir(), "kvroute.yaml")
	if err := os.WriteFile(file, []byte("version: 1\nworkers:\n- {worker_id: 7, address: \"127.0.0.1:1\", models: [m], block_size: 16}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	router := spawn(t, "kvroute", "serve", "--config", file, "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0", "--no-kv-events")
	asks := func(python string) {
		t.Helper()
		if got := script(t, nil, python, "-I", "-c", fmt.Sprintf("from kvroute.client import KvPushRouter\nprint(KvPushRouter('http://%s', 'm').best_worker_sync([1] * 32))", router.At.HTTP)); got != "(7, 0, 0)\n" {
			t.Errorf("the client's answer is %s", got)
		}
	}

	// Without Go and the sources of the library.
	alone := clean("alone")
	script(t, []string{"PATH=" + t.TempDir()}, tools, "-m", "pip", "--python", alone, "install", find, filepath.Join(source(), "bindings", "python"))
	asks(alone)
	if got := script(t, nil, alone, "-I", "-c", "import kvroute\ntry:\n  kvroute.KvEventPublisher(name='a', kv_block_size=16)\nexcept ImportError as err:\n  print(err)"); !strings.Contains(got, "this installation has the client only: install a wheel for this platform") {
		t.Errorf("without the library the publisher says %s", got)
	}
	if got := script(t, nil, alone, "-I", "../../bindings/python/testdata/documented.py"); got != "" {
		t.Error(got)
	}
	mypy := []string{"-m", "mypy", "--strict", "--cache-dir", filepath.Join(home, "mypy")}
	script(t, nil, tools, append(mypy, "../../bindings/python/kvroute")...)
	script(t, nil, tools, append(mypy, "--python-executable", alone, "-c", "from kvroute import KvEventPublisher\nfrom kvroute.client import KvPushRouter\nn: int = KvPushRouter('u', 'm').best_worker_sync([1])[0]\np: KvEventPublisher")...)

	if _, err := exec.LookPath("cc"); err != nil {
		t.Log("NOT TESTED: there is no C compiler, so the wheel with the C library is not tested")
		return
	}
	wheels := t.TempDir()
	script(t, []string{"KVROUTE_PURE=1"}, tools, "-m", "pip", "wheel", find, "--no-deps", "-w", wheels, "../../bindings/python")
	script(t, []string{"KVROUTE_PURE=0"}, tools, "-m", "pip", "wheel", find, "--no-deps", "-w", wheels, "../../bindings/python")
	changes, err := os.ReadFile("../../CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	name := "kvroute-" + string(regexp.MustCompile(`(?m)^## \[(\d[^\]]*)\]`).FindSubmatch(changes)[1]) + "-py3-none-"
	all, err := filepath.Glob(filepath.Join(wheels, name+"*.whl"))
	if err != nil || len(all) != 2 || filepath.Base(all[0]) != name+"any.whl" {
		t.Fatalf("the wheels %s… are %v, %v", name, all, err)
	}
	if list := script(t, nil, tools, "-m", "zipfile", "-l", all[0]); strings.Contains(list, "libkvroute") || !strings.Contains(list, "kvroute/py.typed") {
		t.Errorf("the wheel for all platforms has\n%s", list)
	}
	both := clean("both")
	script(t, nil, tools, "-m", "pip", "--python", both, "install", "--find-links="+wheels, "kvroute") // pip takes that of the platform
	asks(both)
	publishes(t, exec.Command(both, "-I", "../../bindings/python/testdata/publish.py"))
}
