// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// composeService has the settings that the services of docker-compose.yaml use. The test refuses others.
type composeService struct {
	Profiles []string
	Image    string
	Build    struct {
		Context, Target string
		Args            map[string]string
	}
	PullPolicy  string `yaml:"pull_policy"`
	Command     []string
	Environment map[string]string
	DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
	Healthcheck struct {
		Test              []string
		Interval, Timeout string
		Retries           int
	}
	ReadOnly    bool `yaml:"read_only"`
	Tmpfs       []string
	MemLimit    string `yaml:"mem_limit"`
	CPUs        float64
	CapDrop     []string `yaml:"cap_drop"`
	SecurityOpt []string `yaml:"security_opt"`
	Ports       []string
	Volumes     []string
	Networks    map[string]struct {
		Address string `yaml:"ipv4_address"`
	}
	ExtraHosts []string `yaml:"extra_hosts"`
	User       string
	Attach     bool
	Restart    string
}

type composeFile struct {
	Services map[string]composeService
	Networks map[string]any
}

func readRoot(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var composeVariable = regexp.MustCompile(`\$\{([A-Z_]+):-([^}]*)\}`)

// realEngines are values of .env for the profile real.
var realEngines = map[string]string{"WORKERS": "engine-1:8000 engine-2:8000", "MODEL": "sim", "TOKENIZER": "./internal/enginesim/model"}

// readCompose reads docker-compose.yaml with values for its variables; a missing one has its default.
func readCompose(t *testing.T, values map[string]string) (file composeFile) {
	t.Helper()
	text := composeVariable.ReplaceAllStringFunc(readRoot(t, "docker-compose.yaml"), func(v string) string {
		m := composeVariable.FindStringSubmatch(v)
		if value, ok := values[m[1]]; ok {
			return value
		}
		return m[2]
	})
	decoder := yaml.NewDecoder(strings.NewReader(text), yaml.DisallowUnknownField(), yaml.AllowFieldPrefixes("x-"), yaml.AllowDuplicateMapKey())
	if err := decoder.Decode(&file); err != nil {
		t.Fatal(err)
	}
	return file
}

// docker-compose.yaml runs without changes: its images are built from the Dockerfile or are official
// images of a fixed version, its services wait for each other's health checks, its files exist, and
// kvroute accepts its commands.
func TestComposeFile(t *testing.T) {
	file := readCompose(t, realEngines)
	dockerfile := readRoot(t, "Dockerfile")
	official := regexp.MustCompile(`^docker\.io/[a-z]+/[a-z]+:[a-z0-9.-]*[0-9][a-z0-9.-]*$`)
	for _, from := range regexp.MustCompile(`(?m)^FROM (docker\S+)`).FindAllStringSubmatch(dockerfile, -1) {
		if !official.MatchString(from[1]) {
			t.Errorf("Dockerfile: %s is not an official image of a version", from[1])
		}
	}
	built := map[string]string{} // by image: the service that builds it; BuildKit refuses to build one image twice at the same time
	for name, s := range file.Services {
		if other, ok := built[s.Image]; ok && s.Build.Target != "" {
			t.Errorf("%s and %s build %s", name, other, s.Image)
		}
		if s.Build.Target != "" {
			built[s.Image] = name
		}
	}
	for name, s := range file.Services {
		if built[s.Image] == "" && !official.MatchString(s.Image) {
			t.Errorf("%s: %q is neither built here nor an official image of a version", name, s.Image)
		}
		if s.Build.Target != "" && (s.Build.Context != "." || !strings.Contains(dockerfile, " AS "+s.Build.Target+"\n")) {
			t.Errorf("%s: the Dockerfile has no target %q", name, s.Build.Target)
		}
		for arg := range s.Build.Args {
			if !strings.Contains(dockerfile, "\nARG "+arg+"\n") {
				t.Errorf("%s: the Dockerfile has no argument %s", name, arg)
			}
		}
		if !s.ReadOnly || s.MemLimit == "" || s.CPUs == 0 || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) {
			t.Errorf("%s: it may write to its image, has capabilities or no limits: %+v", name, s)
		}
		for _, port := range s.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s: other machines reach the port %s", name, port)
			}
		}
		for _, volume := range s.Volumes {
			host, rest, _ := strings.Cut(volume, ":")
			if _, err := os.Stat("../../" + host); err != nil || !strings.HasSuffix(rest, ":ro") {
				t.Errorf("%s: the volume %s does not exist, or is not read-only: %v", name, volume, err)
			}
		}
		for network := range s.Networks {
			if _, ok := file.Networks[network]; !ok && network != "default" {
				t.Errorf("%s: there is no network %s", name, network)
			}
		}
		if name != "load" && (len(s.Healthcheck.Test) < 2 || s.Healthcheck.Test[0] != "CMD" || s.Healthcheck.Retries == 0) {
			t.Errorf("%s has no health check", name)
		}
		if flags := s.Build.Args["FLAGS"]; s.Build.Target == "envoy" {
			_, heap, _ := strings.Cut(flags, "--max-heap-bytes ")
			heap, _, _ = strings.Cut(heap, " ")
			limit, err := strconv.Atoi(strings.TrimSuffix(s.MemLimit, "m"))
			if bytes, _ := strconv.Atoi(heap); err != nil || bytes <= 0 || bytes>>20 > limit*9/10 {
				t.Errorf("%s: Envoy may use %q bytes of the container's %s", name, heap, s.MemLimit)
			}
		}
		if strings.HasPrefix(s.Image, "kvroute") && !strings.HasPrefix(s.Image, "kvroute-envoy") {
			checkKvroute(t, name, s)
		}
	}
	_, version, _ := strings.Cut(readRoot(t, "tools/envoy.sh"), "version=${1:-")
	version, _, _ = strings.Cut(version, "}")
	if version == "" || !strings.Contains(dockerfile, "envoyproxy/envoy:v"+version+" ") {
		t.Errorf("the Dockerfile's Envoy is not tools/envoy.sh's, %q", version)
	}
}

// The version that the Dockerfile's argument VERSION gives is the version that the image's program shows.
func TestComposeImageVersion(t *testing.T) {
	_, flags, _ := strings.Cut(readRoot(t, "Dockerfile"), ` -ldflags "`)
	flags, _, _ = strings.Cut(flags, `"`)
	for version, want := range map[string]string{"v1.2.3-4-gabcdef": "kvroute v1.2.3-4-gabcdef\n", "": "kvroute (devel)\n"} {
		binary := filepath.Join(t.TempDir(), "kvroute")
		build := exec.Command("sh", "-ec", `go build -buildvcs=false -ldflags "`+flags+`" -o "$OUT" .`)
		build.Env = append(os.Environ(), "VERSION="+version, "OUT="+binary)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if out, err := exec.Command(binary, "version").CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("VERSION=%s: kvroute version prints %q, %v, want %q", version, out, err, want)
		}
	}
}

// checkKvroute checks that kvroute accepts a service's command, variables and health check, and that each of
// these variables belongs to a flag of the command.
func checkKvroute(t *testing.T, name string, s composeService) {
	t.Helper()
	if s.PullPolicy != "never" {
		t.Errorf("%s would be pulled", name)
	}
	flags := flagsOf(t, s.Command[0])
	for key, value := range s.Environment {
		if flag := "--" + strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(key, "KVROUTE_"), "_", "-")); !flags[flag] {
			t.Errorf("%s: kvroute %s does not read %s", name, s.Command[0], key)
		}
		t.Setenv(key, value)
	}
	args := slices.Clone(s.Command)
	if args[0] == "serve" { // config prints the meaning of the same flags
		args[0] = "config"
	} else {
		args = append(args, "-h")
	}
	for i := range args { // files in the container are files of the mounted folders
		for _, volume := range s.Volumes {
			if host, rest, _ := strings.Cut(volume, ":"); strings.HasPrefix(args[i], strings.TrimSuffix(rest, ":ro")+"/") {
				args[i] = "../../" + host + strings.TrimPrefix(args[i], strings.TrimSuffix(rest, ":ro"))
			}
		}
		if args[i] == "/kvroute.yaml" {
			args[i] = realSettings(t, s.Build.Args)
		}
	}
	commands := [][]string{args}
	if check := s.Healthcheck.Test; len(check) > 2 && check[1] == "/kvroute" {
		commands = append(commands, append(slices.Clone(check[2:]), "-h"))
	}
	for _, args := range commands {
		if status, _, stderr := runs(t, args...); status != 0 {
			t.Errorf("%s: kvroute %v: status %d, %s", name, args, status, stderr)
		}
	}
	for key := range s.Environment {
		_ = os.Unsetenv(key)
	}
}

// realSettings runs the Dockerfile's command that writes the configuration of the profile real, and returns its path.
func realSettings(t *testing.T, args map[string]string) string {
	t.Helper()
	_, script, _ := strings.Cut(readRoot(t, "Dockerfile"), "\nRUN if ")
	script, _, _ = strings.Cut(script, "\n\n")
	path := filepath.Join(t.TempDir(), "kvroute.yaml")
	cmd := exec.Command("sh", "-ec", "if "+strings.ReplaceAll(script, "/kvroute.yaml", path))
	for name, value := range args {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// The profiles of docker-compose.yaml are the expected ones. Whatever starts with a profile waits only for services that
// start with it, too: those of the same profile, and those without one. Only what a profile needs has no profile.
func TestComposeProfiles(t *testing.T) {
	file := readCompose(t, nil)
	profiles := map[string]bool{}
	for name, s := range file.Services {
		for on, is := range s.DependsOn {
			dependency, ok := file.Services[on]
			if !ok || is.Condition != "service_healthy" || len(dependency.Healthcheck.Test) == 0 {
				t.Errorf("%s waits for %q with the condition %q", name, on, is.Condition)
			}
			if len(dependency.Profiles) > 0 && !slices.Equal(dependency.Profiles, s.Profiles) {
				t.Errorf("%s waits for %s, which starts with the profiles %q only", name, on, dependency.Profiles)
			}
		}
		for _, p := range s.Profiles {
			profiles[p] = true
		}
	}
	if got, want := slices.Sorted(maps.Keys(profiles)), []string{"hierarchy", "observability", "real", "split"}; !slices.Equal(got, want) {
		t.Errorf("profiles %q, want %q", got, want)
	}
	for _, p := range slices.Sorted(maps.Keys(profiles)) {
		if !strings.Contains(readRoot(t, "docker-compose.yaml"), "#   docker compose --profile "+p+" up --build") {
			t.Errorf("the file's first comment does not say how to start the profile %s", p)
		}
	}
	// Named alone, the Envoy of a profile starts neither the default stack's workers nor its load.
	for _, p := range []string{"hierarchy", "real", "split"} {
		for name := range composeClosure(file, p+"-envoy") {
			if name != "nats" && !slices.Contains(file.Services[name].Profiles, p) {
				t.Errorf("%s-envoy starts %s of another stack", p, name)
			}
		}
	}
}

// composeClosure returns the names of a service and of those that it waits for.
func composeClosure(file composeFile, name string) map[string]bool {
	names := map[string]bool{name: true}
	for on := range file.Services[name].DependsOn {
		maps.Copy(names, composeClosure(file, on))
	}
	return names
}

// Each Envoy knows the replicas and workers that it waits for, and the upper one the groups' Envoys by their addresses. Prometheus
// scrapes the replicas and the admin endpoint of the default stack.
func TestComposeAddresses(t *testing.T) {
	file := readCompose(t, realEngines)
	groups := readRoot(t, "examples/hierarchy/compose.yaml")
	bootstraps := map[string]string{}
	for name, s := range file.Services {
		if s.Build.Target != "envoy" {
			continue
		}
		args := append([]string{"config", "envoy"}, strings.Fields(s.Build.Args["FLAGS"])...)
		for worker := range strings.FieldsSeq(s.Build.Args["WORKERS"]) {
			args = append(args, "--pool", worker)
		}
		status, bootstrap, stderr := runs(t, args...)
		if status != 0 {
			t.Fatalf("%s: kvroute %v: status %d, %s", name, args, status, stderr)
		}
		bootstraps[name] = bootstrap
		for on := range s.DependsOn {
			want := []string{on}
			if address := file.Services[on].Networks["groups"].Address; address != "" {
				want = []string{address}
				if !strings.Contains(groups, `"`+address+`:8080"`) {
					t.Errorf("the upper kvroute does not know %s at %s", on, address)
				}
			}
			if on == "prefill" { // gets no whole requests
				continue
			}
			for _, host := range want {
				if !strings.Contains(bootstrap, host) {
					t.Errorf("%s does not know %s", name, host)
				}
			}
		}
	}
	for engine := range strings.FieldsSeq(realEngines["WORKERS"]) {
		if host, _, _ := strings.Cut(engine, ":"); !strings.Contains(bootstraps["real-envoy"], host) {
			t.Errorf("real-envoy does not know %s", engine)
		}
	}
	path := realSettings(t, file.Services["real-kvroute"].Build.Args)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// The tokenizer's folder is mounted at /model in the container.
	checked := writeFile(t, strings.ReplaceAll(string(text), "tokenizer: /model", "tokenizer: ../../internal/enginesim/model"))
	if status, _, stderr := runs(t, "config", "check", "--config", checked); status != 0 || strings.Count(string(text), "- {name: \"engine-") != 2 {
		t.Errorf("status %d, %s: %s", status, stderr, text)
	}
	prometheus := readRoot(t, "examples/observability/prometheus.yaml")
	for _, target := range []string{"kvroute-1:9003", "kvroute-2:9003", "envoy:9901"} {
		host, port, _ := strings.Cut(target, ":")
		s, ok := file.Services[host]
		listens := s.Environment["KVROUTE_HTTP_ADDRESS"] + s.Build.Args["FLAGS"]
		if !ok || !strings.Contains(prometheus, `"`+target+`"`) || !strings.Contains(listens, "0.0.0.0:"+port) {
			t.Errorf("Prometheus does not reach %s", target)
		}
	}
}

// .env.example names each variable of docker-compose.yaml, with a comment. Without .env kvroute says what is missing.
func TestComposeVariables(t *testing.T) {
	example := readRoot(t, ".env.example")
	for _, v := range composeVariable.FindAllStringSubmatch(readRoot(t, "docker-compose.yaml"), -1) {
		if !regexp.MustCompile(`(?m)^# .*\n` + v[1] + `=.`).MatchString(example) {
			t.Errorf(".env.example does not explain %s", v[1])
		}
	}
	path := realSettings(t, readCompose(t, nil).Services["real-kvroute"].Build.Args)
	if status, _, stderr := runs(t, "config", "--config", path); status == 0 || !strings.Contains(stderr, "set WORKERS, MODEL and TOKENIZER in .env") {
		t.Errorf("without .env: status %d, %s", status, stderr)
	}
	if !strings.Contains(readRoot(t, ".dockerignore"), ".env\n") || !strings.Contains(readRoot(t, ".gitignore"), "/.env\n") {
		t.Error(".env is not ignored by Docker or Git")
	}
}
