// SPDX-License-Identifier: Apache-2.0

// Command browser makes the pictures of the dashboard for the documents. The tests beside it drive the dashboard of
// the built kvroute in headless Chromium, whose path is in the variable BROWSER.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

func main() {
	url := flag.String("url", "http://127.0.0.1:9003", "`URL` of kvroute's API")
	out := flag.String("out", "dashboard.png", "`file` that gets the picture")
	width := flag.Int64("width", 1280, "`pixels` of the window")
	height := flag.Int64("height", 0, "`pixels` of the picture; 0 shows the whole page")
	scheme := flag.String("scheme", "light", "light or dark")
	wait := flag.String("wait", "#decisions tbody tr", "`selector` of what must be there before the picture")
	click := flag.String("click", "", "`selector` of a button to click before the picture")
	flag.Parse()
	if err := picture(*url, *out, *scheme, *wait, *click, *width, *height); err != nil {
		fmt.Fprintln(os.Stderr, "browser:", err)
		os.Exit(1)
	}
}

// newBrowser starts a browser with one tab. cancel ends it.
func newBrowser(ctx context.Context) (context.Context, context.CancelFunc) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(os.Getenv("BROWSER")))
	if os.Getuid() == 0 { // Chromium refuses to run as root with its sandbox
		options = append(options, chromedp.NoSandbox)
	}
	allocated, end := chromedp.NewExecAllocator(ctx, options...)
	tab, closeTab := chromedp.NewContext(allocated)
	return tab, func() { closeTab(); end() }
}

// setScheme makes the browser prefer light or dark.
func setScheme(ctx context.Context, scheme string) error {
	_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}},
	})
	return err
}

// picture writes a picture of the page with 256 colours.
func picture(url, out, scheme, wait, click string, width, height int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	ctx, end := newBrowser(ctx)
	defer end()
	if err := setScheme(ctx, scheme); err != nil {
		return err
	}
	shot := chromedp.FullScreenshot(100)
	if height > 0 {
		shot = chromedp.CaptureScreenshot()
	}
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(width, max(height, 900)), chromedp.Navigate(url), chromedp.WaitVisible(chromedp.CSS(wait)), chromedp.Sleep(5*time.Second)); err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	if click != "" {
		// The script finds and clicks in one step: rows move while requests come.
		script := fmt.Sprintf("document.querySelector(%q).click()", click)
		opens := []chromedp.Action[chromedp.Void]{chromedp.WaitVisible(chromedp.CSS(click)), chromedp.Evaluate[chromedp.Void](script), chromedp.Sleep(time.Second)}
		if err := chromedp.Do(ctx, opens...); err != nil {
			return fmt.Errorf("%s: %w", url, err)
		}
	}
	taken, err := chromedp.Run(ctx, shot)
	if err != nil {
		return err
	}
	full, err := png.Decode(bytes.NewReader(taken))
	if err != nil {
		return err
	}
	var small bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, paletted(full)); err != nil {
		return err
	}
	fmt.Printf("%s: %d KB\n", out, small.Len()/1000)
	return os.WriteFile(out, small.Bytes(), 0o644)
}

// paletted returns an image with its 256 most frequent colours. The others become the nearest of them.
func paletted(full image.Image) image.Image {
	count := map[color.RGBA]int{}
	size := full.Bounds()
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	for y := size.Min.Y; y < size.Max.Y; y++ {
		for x := size.Min.X; x < size.Max.X; x++ {
			count[at(x, y)]++
		}
	}
	colours := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int { return count[b] - count[a] })
	var palette color.Palette
	for _, c := range colours[:min(256, len(colours))] {
		palette = append(palette, c)
	}
	index := map[color.RGBA]uint8{}
	small := image.NewPaletted(size, palette)
	for y := size.Min.Y; y < size.Max.Y; y++ {
		for x := size.Min.X; x < size.Max.X; x++ {
			c := at(x, y)
			i, known := index[c]
			if !known {
				i = uint8(palette.Index(c))
				index[c] = i
			}
			small.SetColorIndex(x, y, i)
		}
	}
	return small
}
