// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// docker-compose.yaml runs without changes: its images are built from the Dockerfile or are official
// images of a fixed version, its services wait for each other's health checks, and kvroute accepts
// its commands.
func TestComposeFile(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile("../../" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	type service struct {
		Image string
		Build struct {
			Context, Target string
			Args            map[string]string
		}
		PullPolicy  string `yaml:"pull_policy"`
		Command     []string
		DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
		Healthcheck struct{ Test []string }
		ReadOnly    bool   `yaml:"read_only"`
		MemLimit    string `yaml:"mem_limit"`
		CPUs        float64
		CapDrop     []string `yaml:"cap_drop"`
		Ports       []string
	}
	var file struct{ Services map[string]service }
	if err := yaml.Unmarshal([]byte(read("docker-compose.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	dockerfile := read("Dockerfile")
	official := regexp.MustCompile(`^docker\.io/[a-z]+/[a-z]+:[a-z0-9.-]*[0-9][a-z0-9.-]*$`)
	for _, from := range regexp.MustCompile(`(?m)^FROM (docker\S+)`).FindAllStringSubmatch(dockerfile, -1) {
		if !official.MatchString(from[1]) {
			t.Errorf("Dockerfile: %s is not an official image of a version", from[1])
		}
	}
	built := map[string]string{} // by service; BuildKit refuses to build one image twice at the same time
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
		if !s.ReadOnly || s.MemLimit == "" || s.CPUs == 0 || !slices.Equal(s.CapDrop, []string{"ALL"}) {
			t.Errorf("%s: it may write to its image, has capabilities or no limits: %+v", name, s)
		}
		for _, port := range s.Ports {
			if !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s: other machines reach the port %s", name, port)
			}
		}
		if name != "load" && len(s.Healthcheck.Test) == 0 {
			t.Errorf("%s has no health check", name)
		}
		for on, is := range s.DependsOn {
			if _, ok := file.Services[on]; !ok || is.Condition != "service_healthy" {
				t.Errorf("%s waits for %q with the condition %q", name, on, is.Condition)
			}
		}
		if s.Image != "kvroute:dev" {
			continue
		}
		if s.PullPolicy != "never" {
			t.Errorf("%s would be pulled", name)
		}
		args := s.Command
		if args[0] == "serve" { // config prints the meaning of the same flags
			args = append([]string{"config"}, args[1:]...)
		} else {
			args = append(args, "-h")
		}
		if status, _, stderr := runs(t, args...); status != 0 {
			t.Errorf("%s: kvroute %v: status %d, %s", name, args, status, stderr)
		}
	}
	flags := append([]string{"config", "envoy"}, strings.Fields(file.Services["envoy"].Build.Args["FLAGS"])...)
	status, bootstrap, stderr := runs(t, flags...)
	if status != 0 {
		t.Fatalf("kvroute %v: status %d, %s", flags, status, stderr)
	}
	for name := range file.Services {
		if (strings.HasPrefix(name, "worker-") || strings.HasPrefix(name, "kvroute-")) && !strings.Contains(bootstrap, name) {
			t.Errorf("Envoy does not know %s", name)
		}
	}
	_, version, _ := strings.Cut(read("tools/envoy.sh"), "version=${1:-")
	version, _, _ = strings.Cut(version, "}")
	if version == "" || !strings.Contains(dockerfile, "envoyproxy/envoy:v"+version+" ") {
		t.Errorf("the Dockerfile's Envoy is not tools/envoy.sh's, %q", version)
	}
}
